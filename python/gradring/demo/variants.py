"""The three ways in which the demo runs its script, each through ``gradring run``."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gradring.demo.progress import Progress
from gradring.errors import GradringError

WORKERS = 2
DEADLINE_S = 180.0
"""For one training, which takes about ten seconds; a strategy that waits for ever ends then."""
CLOSING_S = 20.0
"""For the launcher to end its ranks after SIGTERM; its own grace period is shorter."""
LAST_LINES = 25


@dataclass(frozen=True)
class Variant:
    """One training."""

    strategy: str
    title: str
    world_size: int

    @property
    def threads(self) -> int:
        """Of one process: all variants have the same number in all."""
        return WORKERS // self.world_size


GRADRING = Variant("gradring", "gradring", WORKERS)
MIRRORED = Variant("multi-worker-mirrored", "MultiWorkerMirrored", WORKERS)
SINGLE = Variant("single", "single process", 1)


class TrainingError(GradringError, RuntimeError):
    """A training did not end well; the message ends with the last lines that it printed."""


def train(variant: Variant, output: Path, log: Path, epochs: int, progress: Progress) -> None:
    """Trains; the ranks write to ``output``, and all that they print goes to ``log`` as well.

    Raises:
        TrainingError: The launcher reports a failure, or the training takes too long.
    """
    command = [
        *(sys.executable, "-m", "gradring", "run", "-np", str(variant.world_size), "--"),
        *(sys.executable, "-m", "gradring.demo.train", "--strategy", variant.strategy),
        *("--epochs", str(epochs), "--output", str(output)),
    ]
    lines: list[str] = []
    with open(log, "w", encoding="utf-8") as file, child_of(command, variant.threads) as child:

        def read() -> None:
            assert child.stdout is not None
            for line in child.stdout:
                file.write(line)
                lines.append(line)
                progress.feed(line)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            exit_code = child.wait(timeout=DEADLINE_S)
            reason = f"exit code {exit_code}"
        except subprocess.TimeoutExpired:
            exit_code, reason = 1, f"no end within {DEADLINE_S:g} s"
            _terminate(child)
        reader.join(timeout=CLOSING_S)
    if exit_code != 0:
        raise TrainingError(
            f"the training with {variant.title} failed ({reason}); {log} holds all that it "
            f"printed. The end of it:\n{''.join(lines[-LAST_LINES:])}"
        )


@contextmanager
def child_of(command: list[str], threads: int) -> Iterator[subprocess.Popen[str]]:
    """The launcher; it does not survive the block."""
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "TF_NUM_INTRAOP_THREADS": str(threads),
        "TF_NUM_INTEROP_THREADS": str(threads),
        "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2"),
        "PYTHONUTF8": "1",
    }
    with subprocess.Popen(
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    ) as child:
        try:
            yield child
        finally:
            _terminate(child)


def _terminate(child: subprocess.Popen[str]) -> None:
    if child.poll() is not None:
        return
    child.terminate()
    try:
        child.wait(timeout=CLOSING_S)
    except subprocess.TimeoutExpired:
        child.kill()
