"""Running the command line as a user does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launching import DEADLINE_S, Gradring, Script, command_line


@pytest.fixture
def gradring() -> Gradring:
    """Runs the command line to its end; keyword arguments are variables."""

    def run(*arguments: object, **variables: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            command_line(*arguments),
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )

    return run


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Writes a Python program for the ranks and returns the command that runs it."""

    def write(text: str) -> list[str]:
        path = tmp_path / "train.py"
        head = "import os, signal, sys, time\nrank = int(os.environ['GRADRING_RANK'])\n"
        path.write_text(head + text)
        return [sys.executable, str(path)]

    return write
