"""The three ways in which the demo runs its script, each through ``gradring run``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from gradring.errors import GradringError

WORKERS = 2
#: For one training, which takes about ten seconds; a strategy that waits for ever ends then.
DEADLINE_S = 180.0
#: For the launcher to end its ranks after SIGTERM; its own grace period is shorter.
CLOSING_S = 20.0
LAST_LINES = 25
#: Between two lines where they cannot be rewritten, such as in the log of a CI job.
PLAIN_S = 2.0


@dataclass(frozen=True)
class Variant:
    """One training."""

    strategy: str
    title: str
    world_size: int


GRADRING = Variant("gradring", "gradring", WORKERS)
MIRRORED = Variant("multi-worker-mirrored", "MultiWorkerMirrored", WORKERS)
SINGLE = Variant("single", "single process", 1)


class TrainingError(GradringError, RuntimeError):
    """A training did not end well; the message ends with the last lines that it printed."""


class LiveLine:
    """What a training said last: a line that is rewritten on a terminal, elsewhere some lines."""

    def __init__(self, title: str, stream: TextIO) -> None:
        """Begins with the start-up.

        Args:
            title: Name of the training, at the start of each line.
            stream: Where to write.
        """
        self._title = title
        self._stream = stream
        self._terminal = stream.isatty()
        self._shown_s = time.monotonic()
        self.show("starting TensorFlow")

    def feed(self, line: str) -> None:
        """Takes a line that the launcher printed; only rank 0's line of an epoch counts."""
        now_s = time.monotonic()
        if line.startswith("[0] epoch ") and (self._terminal or now_s - self._shown_s >= PLAIN_S):
            self._shown_s = now_s
            self.show(line.removeprefix("[0] ").rstrip())

    def show(self, text: str, *, last: bool = False) -> None:
        """Writes a line; on a terminal the next one takes its place, if it is not the last."""
        line = f"{self._title:<20} {text}"
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            self._stream.write(f"\r\x1b[2K{line[:width]}" + "\n" * last)
        else:
            self._stream.write(f"{line}\n")
        self._stream.flush()


def train(variant: Variant, output: Path, log: Path, epochs: int, live: LiveLine) -> None:
    """Trains; the ranks write to ``output``, and all that they print goes to ``log`` as well.

    Raises:
        TrainingError: The launcher reports a failure, or the training takes too long.
    """
    options = ["--strategy", variant.strategy, "--epochs", str(epochs), "--output", str(output)]
    lines: list[str] = []
    output.mkdir(parents=True, exist_ok=True)
    with open(log, "w", encoding="utf-8") as file:

        def hear(line: str) -> None:
            file.write(line)
            lines.append(line)
            live.feed(line)

        exit_code = run_script("gradring.tools.demo.train", variant.world_size, [], options, hear)
    if exit_code != 0:
        reason = (
            f"no end within {DEADLINE_S:g} s" if exit_code is None else f"exit code {exit_code}"
        )
        raise TrainingError(
            f"the training with {variant.title} failed ({reason}); {log} holds all that it "
            f"printed. The end of it:\n{''.join(lines[-LAST_LINES:])}"
        )


def run_script(
    module: str,
    world_size: int,
    launch: Sequence[str],
    options: Sequence[str],
    hear: Callable[[str], None],
) -> int | None:
    """Runs a script on so many ranks, which share the threads of all workers.

    Args:
        module: The script.
        world_size: Number of ranks.
        launch: Further options of ``gradring run``.
        options: Those of the script.
        hear: Called in another thread with each line that is printed.

    Returns:
        The launcher's exit code; None if it was ended because it took too long.
    """
    command = [sys.executable, "-m", "gradring", "run", "-np", str(world_size), *launch, "--"]
    command += [sys.executable, "-m", module, *options]
    threads = str(max(1, WORKERS // world_size))
    environ = {
        "TF_CPP_MIN_LOG_LEVEL": "2",
        **os.environ,
        **dict.fromkeys(
            ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"), threads
        ),
        "PYTHONUTF8": "1",
        "PYTHONUNBUFFERED": "1",
    }
    environ.pop("GRADRING_FLIGHT_DIR", None)
    with subprocess.Popen(
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    ) as child:
        reader = threading.Thread(target=_hear_all, args=(child.stdout, hear), daemon=True)
        reader.start()
        try:
            return child.wait(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if child.poll() is None:
                _end(child)
            reader.join(timeout=CLOSING_S)


def _hear_all(lines: Iterable[str], hear: Callable[[str], None]) -> None:
    for line in lines:
        hear(line)


def _end(child: subprocess.Popen[str]) -> None:
    child.terminate()
    try:
        child.wait(timeout=CLOSING_S)
    except subprocess.TimeoutExpired:
        child.kill()
