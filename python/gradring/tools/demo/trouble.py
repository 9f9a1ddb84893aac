"""``gradring demo --slow-rank R`` and ``--kill R``: reports on a slow or killed rank."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from gradring.tools.demo.results import WORKERS
from gradring.tools.demo.story import require_packages, say, show

SLOW_MS = 20
EPOCHS = 10
ELASTIC_WORKERS = 4
#: Steps between two commits of the elastic training.
COMMIT_EVERY = 10


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
    _, lines = show(WORKERS, ["--log-dir", str(report)], options, stream)
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
    launch = ["--log-dir", str(report), "--min-np", "2"]
    exit_code, lines = show(ELASTIC_WORKERS, launch, ["--kill", str(rank)], stream)
    output = Output("".join(line for _, line in lines))
    for problem in output.problems(exit_code):
        say(stream, f"\n{problem}")
        return 1
    say(stream, f"\n{output.story(rank)}")
    return 0


@dataclass(frozen=True)
class Output:
    """The output of an elastic training's ranks."""

    text: str

    def problems(self, exit_code: int | None) -> Iterator[str]:
        """Yields a sentence on the first requirement that is not met."""
        if exit_code != 0 or not (self._killed and self._on and self._next):
            yield "The training did not come to its end; the lines above say why."
        elif self.repeated > COMMIT_EVERY:
            yield f"{self.repeated} steps were done again: more than between two commits."
        elif len(self._hashes) != ELASTIC_WORKERS or len(set(self._hashes)) != 1:
            yield f"The ranks ended with other weights, or not all: {', '.join(self._hashes)}."

    def story(self, rank: int) -> str:
        """Returns the course of events; call it only if there are no problems."""
        assert self._killed and self._on and self._next
        killed_s, on_s, next_s = (float(at[2]) for at in (self._killed, self._on, self._next))
        joined = re.search(
            rf"generation (\d+): rank \d+ of {ELASTIC_WORKERS} trains on after", self._later
        )
        generation = joined[1] if joined else "?"
        return (
            f"Rank {rank} was killed after step {self._killed[1]}. {on_s - killed_s:.1f} s later "
            f"the others had formed a new group, and {next_s - on_s:.1f} s later, with functions "
            f"traced again, they had ended step {self._next[1]}: {self.repeated} steps were done "
            f"again. Another process joined them in generation {generation}. All "
            f"{len(self._hashes)} ranks have the same weights (SHA-256 {self._hashes[0]}...)."
        )

    @property
    def repeated(self) -> int:
        """Number of repeated steps."""
        assert self._killed is not None and self._next is not None
        return int(self._killed[1]) - int(self._next[1]) + 1

    @property
    def _killed(self) -> re.Match[str] | None:
        return re.search(r"killed after step (\d+) at ([\d.]+) s", self.text)

    @property
    def _later(self) -> str:
        return self.text[self._killed.end() :] if self._killed else ""

    @property
    def _on(self) -> re.Match[str] | None:
        return re.search(r"trains on after step (\d+) at ([\d.]+) s", self._later)

    @property
    def _next(self) -> re.Match[str] | None:
        return re.search(r"step (\d+) ended at ([\d.]+) s", self._later)

    @property
    def _hashes(self) -> list[str]:
        return re.findall(r"steps: test accuracy [\d.]+, weights (\w+)", self.text)
