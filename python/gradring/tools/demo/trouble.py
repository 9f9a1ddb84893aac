"""``gradring demo --slow-rank R`` and ``--kill R``: reports on a slow or killed rank."""

from __future__ import annotations

import re
import sys
import time
from functools import partial
from pathlib import Path
from typing import TextIO

from gradring.tools.demo.launched import WORKERS, require_packages, run_script, say

SLOW_MS = 20
EPOCHS = 10
ELASTIC_WORKERS = 4
#: Steps between two commits of the elastic training.
COMMIT_EVERY = 10
_EVENTS = re.compile(
    r"killed after step (\d+) at ([\d.]+) s.*?trains on after step \d+ at ([\d.]+) s"
    r".*?step (\d+) ended at ([\d.]+) s",
    re.DOTALL,
)


def show_slow_rank(rank: int, report: Path, *, stream: TextIO = sys.stdout) -> int:
    """Trains with one rank that sleeps in every step.

    Args:
        rank: The rank to slow down.
        report: Directory for the logs and the times of all steps.
        stream: Output.

    Returns:
        0 if the live lines or the verdict named the rank, else 1.

    Raises:
        ConfigError: A package is missing.
    """
    require_packages()
    say(stream, f"Two workers train; rank {rank} sleeps {SLOW_MS} ms in every step.\n")
    started_s = time.monotonic()
    options = ["--slow-rank", str(rank), "--slow-ms", str(SLOW_MS)]
    options = ["--epochs", str(EPOCHS), *options]
    _, lines = run_script(WORKERS, report, options, partial(say, stream, end=""))
    named = re.compile(rf"slowest: rank {rank} |Rank {rank} on \S+ is the slowest")
    at_s = next((at_s for at_s, line in lines if named.search(line)), None)
    if at_s is None:
        say(stream, f"\nRank {rank} was not named: other programs use this machine; try again.")
        return 1
    say(stream, f"\nRank {rank} was named after {at_s - started_s:.0f} s, start-up included.")
    return 0


def show_killed_rank(rank: int, report: Path, *, stream: TextIO = sys.stdout) -> int:
    """Trains elastically, and kills one rank; the others continue, and a new process joins.

    Args:
        rank: The rank to kill.
        report: Directory for the logs and the flight records.
        stream: Output.

    Returns:
        0 if the training ended well; else 1. The others must have continued without a restart, with
        at most one interval of commits repeated. A new process must have joined, and all ranks must
        have ended with the same weights.

    Raises:
        ConfigError: A package is missing.
    """
    require_packages()
    say(
        stream,
        f"{ELASTIC_WORKERS} workers train and commit every {COMMIT_EVERY} steps; rank {rank} is "
        "killed (SIGKILL) in the middle,\nand gradring run --min-np 2 starts one process in its "
        "place.\n",
    )
    options, show = ["--kill", str(rank)], partial(say, stream, end="")
    exit_code, lines = run_script(ELASTIC_WORKERS, report, options, show, ["--min-np", "2"])
    survived, sentences = outcome("".join(line for _, line in lines), exit_code, rank)
    say(stream, f"\n{sentences}")
    return 0 if survived else 1


def outcome(text: str, exit_code: int | None, rank: int) -> tuple[bool, str]:
    """Returns whether the training survived, and the course of events or the first problem.

    Args:
        text: Output of an elastic training's ranks.
        exit_code: The launcher's.
        rank: The killed rank.
    """
    found = _EVENTS.search(text)
    if exit_code != 0 or found is None:
        return False, "The training did not come to its end; the lines above say why."
    killed_at, killed_s, on_s, next_step, next_s = (float(event) for event in found.groups())
    repeated = int(killed_at - next_step) + 1
    if repeated > COMMIT_EVERY:
        return False, f"{repeated} steps were done again: more than between two commits."
    hashes = re.findall(r"steps: test accuracy [\d.]+, weights (\w+)", text)
    if len(hashes) != ELASTIC_WORKERS or len(set(hashes)) != 1:
        return False, f"The ranks ended with other weights, or not all: {', '.join(hashes)}."
    joined = re.search(
        rf"generation (\d+): rank \d+ of {ELASTIC_WORKERS} trains on after", text[found.end() :]
    )
    return True, (
        f"Rank {rank} was killed after step {killed_at:.0f}. {on_s - killed_s:.1f} s later the "
        f"others had formed a new group, and {next_s - on_s:.1f} s later, with functions traced "
        f"again, they had ended step {next_step:.0f}: {repeated} steps were done again. Another "
        f"process joined them in generation {joined[1] if joined else '?'}. All {len(hashes)} "
        f"ranks have the same weights (SHA-256 {hashes[0]}...)."
    )
