"""A launch of the training script, whose output the demo shows."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
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


def say(stream: TextIO, text: str) -> None:
    """Prints and flushes."""
    print(text, file=stream, flush=True)


def show(
    world_size: int, launch: Sequence[str], options: Sequence[str], stream: TextIO
) -> tuple[int | None, list[tuple[float, str]]]:
    """Runs `run_script` and prints its lines; returns the exit code, and lines with times."""
    lines: list[tuple[float, str]] = []

    def on_line(line: str) -> None:
        lines.append((time.monotonic(), line))
        stream.write(line)
        stream.flush()

    code = run_script(world_size, launch, options, on_line)
    if code is None:
        say(stream, f"The training has not ended within {DEADLINE_S:g} s and is stopped.")
    return code, lines


def run_script(
    world_size: int,
    launch: Sequence[str],
    options: Sequence[str],
    on_line: Callable[[str], None],
) -> int | None:
    """Runs ``train`` on `world_size` ranks, which share the threads of all workers.

    Args:
        world_size: Number of ranks.
        launch: Further options of ``gradring run``.
        options: Options of the script.
        on_line: Called with each line of output.

    Returns:
        The launcher's exit code; None if it was ended after `DEADLINE_S`.
    """
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
                on_line(line)
            child.wait()
        finally:
            limit.cancel()
            _end(child)
    return None if time.monotonic() >= deadline else child.returncode


def _end(child: subprocess.Popen[str]) -> None:
    child.terminate()
    try:
        child.wait(timeout=CLOSING_S)
    except subprocess.TimeoutExpired:
        child.kill()
