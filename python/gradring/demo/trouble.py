"""``gradring demo --slow-rank R`` and ``--kill R``: what a job says about a rank in trouble."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from gradring.demo.story import require_packages
from gradring.demo.variants import DEADLINE_S, GRADRING, child_of

SLOW_MS = 20
EPOCHS = 10


def show_slow_rank(rank: int, *, stream: TextIO = sys.stdout) -> int:
    """Trains with one rank that sleeps in every step.

    Returns:
        0 if the live lines or the verdict named the rank, else 1.

    Raises:
        ConfigError: A package is missing.
    """
    require_packages()
    _say(stream, f"Two workers train; rank {rank} sleeps {SLOW_MS} ms in every step.\n")
    started_s = time.monotonic()
    options = ["--slow-rank", str(rank), "--slow-ms", str(SLOW_MS), "--epochs", str(EPOCHS)]
    lines = _train([], options, stream)
    named = re.compile(rf"slowest: rank {rank} |Rank {rank} on \S+ is the slowest")
    at_s = next((at_s for at_s, line in lines if named.search(line)), None)
    if at_s is None:
        _say(stream, f"\nRank {rank} was not named: other programs use this machine; try again.")
        return 1
    _say(stream, f"\nRank {rank} was named after {at_s - started_s:.0f} s, start-up included.")
    return 0


def show_killed_rank(rank: int, records: Path, *, stream: TextIO = sys.stdout) -> int:
    """Trains, kills one rank with SIGKILL in the middle, and explains what the ranks left behind.

    Args:
        rank: The rank to kill.
        records: Directory for the flight records.
        stream: Where to write.

    Returns:
        0 if the other rank's error named the rank, else 1.

    Raises:
        ConfigError: A package is missing.
    """
    from gradring.trace import explanation
    from gradring.trace.records import read

    require_packages()
    _say(stream, f"Two workers train; rank {rank} is killed (SIGKILL) in the middle.\n")
    options = ["--kill", str(rank), "--epochs", str(EPOCHS)]
    lines = _train([f"GRADRING_FLIGHT_DIR={records.absolute()}"], options, stream)
    _say(stream, f"\ngradring explain {records}")
    for sentence in explanation.explain(read(records)):
        _say(stream, sentence)
    named = re.compile(rf"PeerLostError: .*rank {rank} on ")
    return 0 if any(named.search(line) for _, line in lines) else 1


def _train(
    environ: Sequence[str], options: Sequence[str], stream: TextIO
) -> list[tuple[float, str]]:
    """Runs the training and shows what it prints; returns its lines and when they came."""
    command = [
        # Without it, TensorFlow talks about floating point in the middle of the lines to see.
        *("env", "TF_ENABLE_ONEDNN_OPTS=0", *environ),
        *(sys.executable, "-m", "gradring", "run", "-np", str(GRADRING.world_size), "--"),
        *(sys.executable, "-m", "gradring.demo.trouble_train", *options),
    ]
    lines: list[tuple[float, str]] = []
    with child_of(command, GRADRING.threads) as child:

        def read() -> None:
            assert child.stdout is not None
            for line in child.stdout:
                lines.append((time.monotonic(), line))
                stream.write(line)
                stream.flush()

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            child.wait(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            _say(stream, f"The training has not ended within {DEADLINE_S:g} s and is stopped.")
    reader.join(timeout=DEADLINE_S)
    return lines


def _say(stream: TextIO, text: str) -> None:
    print(text, file=stream, flush=True)
