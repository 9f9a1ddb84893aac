"""A launch of the training script, whose output the demo shows."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from gradring.config.words import agreed, listed
from gradring.errors import ConfigError
from gradring.machine import packages

WORKERS = 2
EPOCHS = 20
#: Time limit of one training, which takes about ten seconds; ends a strategy that hangs.
DEADLINE_S = 180.0
#: Time for the launcher to end its ranks after SIGTERM; its own grace period is shorter.
CLOSING_S = 20.0
#: Packages of the extra ``demo``, by the name of their module.
NEEDED = {"tensorflow": "TensorFlow", "sklearn": "scikit-learn", "matplotlib": "matplotlib"}


def require_packages() -> None:
    """Checks that the demo's packages are installed, without importing them.

    Raises:
        ConfigError: A package is missing; the message has the command to install it.
    """
    if missing := packages.missing(NEEDED):
        verb = agreed(len(missing), "is", "are")
        raise ConfigError(
            f"{listed([NEEDED[module] for module in missing])} {verb} missing; install what the "
            f"demo needs with: {packages.advice(missing)}"
        )


def say(stream: TextIO, text: str, end: str = "\n") -> None:
    """Prints and flushes."""
    print(text, end=end, file=stream, flush=True)


def run_script(
    world_size: int,
    log_dir: Path,
    options: Sequence[str],
    show: Callable[[str], object],
    launch: Sequence[str] = (),
) -> tuple[int | None, list[tuple[float, str]]]:
    """Runs ``train`` on `world_size` ranks, which share the threads of all workers.

    Args:
        world_size: Number of ranks.
        log_dir: Directory for the ranks' output.
        options: Options of the script.
        show: Called with each line of output.
        launch: Further options of ``gradring run``.

    Returns:
        The launcher's exit code, None if it was ended after `DEADLINE_S`; and its lines with the
        times at which they were printed.
    """
    launch = ["--log-dir", str(log_dir), *launch]
    lines: list[tuple[float, str]] = []
    command = [sys.executable, "-m", "gradring", "run", "-np", str(world_size), *launch, "--"]
    command += [sys.executable, "-m", "gradring.tools.demo.train", *options]
    kinds = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
    environ = {
        "TF_CPP_MIN_LOG_LEVEL": "2",
        **os.environ,
        **dict.fromkeys(kinds, str(max(1, WORKERS // world_size))),
        "PYTHONUTF8": "1",
        "PYTHONUNBUFFERED": "1",
    }
    environ.pop("GRADRING_FLIGHT_DIR", None)
    deadline = time.monotonic() + DEADLINE_S
    with subprocess.Popen(
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    ) as child:
        assert child.stdout is not None
        limit = threading.Timer(DEADLINE_S, _end, [child])
        limit.start()
        try:
            for line in child.stdout:
                lines.append((time.monotonic(), line))
                show(line)
            child.wait()
        finally:
            limit.cancel()
            _end(child)
    if time.monotonic() < deadline:
        return child.returncode, lines
    show(f"The training has not ended within {DEADLINE_S:g} s and is stopped.\n")
    return None, lines


def _end(child: subprocess.Popen[str]) -> None:
    child.terminate()
    try:
        child.wait(timeout=CLOSING_S)
    except subprocess.TimeoutExpired:
        child.kill()
