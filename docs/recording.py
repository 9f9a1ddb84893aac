"""Types the tutorial's commands into a recorded terminal, in a new directory.

``make recording`` shows it to termtosvg, which draws ``docs/images/tutorial.svg``. TensorFlow's
log, oneDNN, which writes lines all the same, and Keras' warnings are off.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from support.documents import ROOT, blocks_of, programs

PAGE = ROOT / "docs" / "tutorial.md"
PROMPT = "\x1b[32m$\x1b[0m "
KEY_S = 0.02
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0", "PYTHONWARNINGS": "ignore"}


def commands() -> list[str]:
    """Those of the page that one host runs."""
    written = (block for block in blocks_of(PAGE) if block.language == "bash")
    return [line for block in written for line in block.commands if "--hosts" not in line]


def main() -> None:
    """Types and runs all of them."""
    with tempfile.TemporaryDirectory() as directory:
        for name in ("prepare.py", "digits.py"):
            Path(directory, name).write_text(programs()[name])
        for command in commands():
            print(PROMPT, end="", flush=True)
            for letter in command:
                print(letter, end="", flush=True)
                time.sleep(KEY_S)
            print(flush=True)
            subprocess.run(command, shell=True, cwd=directory, env=os.environ | QUIET, check=False)
        print(PROMPT, end="", flush=True)


if __name__ == "__main__":
    main()
