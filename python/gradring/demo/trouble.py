"""``gradring demo --slow-rank R`` and ``--kill R``: what a job says about a rank in trouble."""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from gradring.demo.story import require_packages, say
from gradring.demo.trainings import DEADLINE_S, GRADRING, run_script

SLOW_MS = 20
EPOCHS = 10


def show_slow_rank(rank: int, report: Path, *, stream: TextIO = sys.stdout) -> int:
    """Trains with one rank that sleeps in every step.

    Args:
        rank: The rank to slow down.
        report: Directory for the logs and the times of all steps.
        stream: Where to write.

    Returns:
        0 if the live lines or the verdict named the rank, else 1.

    Raises:
        ConfigError: A package is missing.
    """
    require_packages()
    say(stream, f"Two workers train; rank {rank} sleeps {SLOW_MS} ms in every step.\n")
    started_s = time.monotonic()
    options = ["--slow-rank", str(rank), "--slow-ms", str(SLOW_MS)]
    _, lines = _train(report, [], options, stream)
    named = re.compile(rf"slowest: rank {rank} |Rank {rank} on \S+ is the slowest")
    at_s = next((at_s for at_s, line in lines if named.search(line)), None)
    if at_s is None:
        say(stream, f"\nRank {rank} was not named: other programs use this machine; try again.")
        return 1
    say(stream, f"\nRank {rank} was named after {at_s - started_s:.0f} s, start-up included.")
    return 0


def show_killed_rank(rank: int, report: Path, *, stream: TextIO = sys.stdout) -> int:
    """Trains, kills one rank with SIGKILL in the middle, and trains on from the last checkpoint.

    Then it explains what the ranks of the first attempt have left behind.

    Args:
        rank: The rank to kill.
        report: Directory for the logs, the times of all steps and the flight records.
        stream: Where to write.

    Returns:
        0 if the other rank's error named the rank, and the restart went on from a checkpoint to the
        end of the training; else 1.

    Raises:
        ConfigError: A package is missing.
    """
    from gradring.observe import explanation, paths
    from gradring.records import read

    require_packages()
    say(
        stream,
        f"Two workers train and save after each epoch; rank {rank} is killed (SIGKILL) in the "
        "middle,\nand gradring run --max-restarts 1 starts both again.\n",
    )
    with tempfile.TemporaryDirectory(prefix="gradring-demo-") as temporary:
        checkpoint = Path(temporary, "checkpoint")
        options = ["--kill", str(rank), "--checkpoint", str(checkpoint)]
        exit_code, lines = _train(report, ["--max-restarts", "1"], options, stream)
    first = paths.of_attempt(paths.flight_of(report), 0)
    if any(paths.written(first)):
        say(stream, f"\ngradring explain {first}")
        for sentence in explanation.explain(read(first)):
            say(stream, sentence)
    text = "".join(line for _, line in lines)
    named = re.search(rf"PeerLostError: .*rank {rank} on ", text)
    resumed = re.search(r"resumes after step (\d+)", text)
    finished = re.search(r"finished .*", text)
    if exit_code != 0 or not (named and resumed and finished):
        say(stream, "\nThe training did not come to its end; the lines above say why.")
        return 1
    say(
        stream,
        f"\nRank {rank} was named; the restart went on after step {resumed[1]} and {finished[0]}.",
    )
    return 0


def _train(
    report: Path, launch: Sequence[str], options: Sequence[str], stream: TextIO
) -> tuple[int | None, list[tuple[float, str]]]:
    """Runs the training and shows what it prints; its exit code, its lines, when they came."""
    lines: list[tuple[float, str]] = []

    def hear(line: str) -> None:
        lines.append((time.monotonic(), line))
        stream.write(line)
        stream.flush()

    launch = ["--log-dir", str(report), *launch]
    options = ["--epochs", str(EPOCHS), *options]
    exit_code = run_script(GRADRING.world_size, launch, options, hear)
    if exit_code is None:
        say(stream, f"The training has not ended within {DEADLINE_S:g} s and is stopped.")
    return exit_code, lines
