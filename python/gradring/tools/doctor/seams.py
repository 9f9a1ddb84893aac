"""Check of the names that gradring needs from TensorFlow and Keras, in the installed versions.

Run as a program, the module prints a line for each package. TensorFlow takes seconds to import, so
commands run the check in a process of its own.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys

_WITHIN_S = 120.0


def lines() -> list[str]:
    """Returns lines such as ``Keras 3.15.1 has 67 of the 67 names ...``, if TensorFlow is there."""
    if importlib.util.find_spec("tensorflow") is None:
        return []
    command = [sys.executable, "-m", __name__]
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    try:
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=_WITHIN_S
        )
    except subprocess.TimeoutExpired:
        return [f"TensorFlow: not imported within {_WITHIN_S:g} s"]
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return [f"TensorFlow: cannot be imported with gradring: {last[0]}"]
    return done.stdout.splitlines()


def _look() -> None:
    from gradring.tensorflow.graph import compat
    from gradring.tensorflow.keras import compat_keras

    found = [compat.FOUND]
    if importlib.util.find_spec("keras") is not None:
        importlib.import_module("keras")
        found.append(compat_keras.look())
    for each in found:
        print(each)
        for seam, why in each.missing.items():
            print(f"{seam} {why}, so gradring refuses to train")
        for seam, why in each.absent.items():
            print(f"{seam} {why}: {seam.without}")


if __name__ == "__main__":
    _look()
