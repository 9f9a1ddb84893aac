"""The rank that keeps others waiting is named, on every rank, and ranks that are even are not."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

import gradring
from gradring.records import lateness
from gradring.stats import Stats
from gradring.testing import run_ranks

RANKS = 4
LATE_S = 0.05
ENOUGH_S = 1.2
MOST_STEPS = 600


def late_rank(late: int, algorithm: str) -> dict[str, Any]:
    with gradring.init(algorithm=algorithm) as comm:
        x = np.ones(1000, np.float32)
        # What the others saw arrives about once a second, and a stall of one of them needs time to
        # count for less.
        for _ in range(MOST_STEPS):
            if comm.rank == late:
                time.sleep(LATE_S)
            comm.all_reduce(x, name="g")
            stats = comm.stats()
            known = knows(stats, late, comm.rank, algorithm)
            if comm.all_reduce(np.array([int(known)]), op="min")[0]:
                break
        return {**stats, "host": comm.host}


def knows(stats: Stats, late: int, rank: int, algorithm: str) -> bool:
    """Whether the rank names the late one, and has itself waited for it where it hears from it."""
    slowest = stats["slowest"]
    if slowest is None or slowest["rank"] != late or slowest["made_wait_s"] <= ENOUGH_S:
        return False
    hears_it = rank != late and (algorithm != "ring" or rank == (late + 1) % RANKS)
    waited_s = stats["lateness_s"].get(late, 0.0)
    return not hears_it or (waited_s > ENOUGH_S and stats["lateness_recent_s"][late] > 0)


@pytest.mark.parametrize(
    "algorithm",
    [*(pytest.param(name, marks=pytest.mark.slow) for name in ("one_shot", "direct")), "ring"],
)
def test_every_rank_names_the_late_one(algorithm: str) -> None:
    late = 2
    for rank, stats in enumerate(run_ranks(late_rank, RANKS, late, algorithm)):
        assert knows(stats, late, rank, algorithm), stats
        assert stats["slowest"]["host"] == stats["host"]


def test_ranks_that_are_late_in_turn_come_out_even() -> None:
    waits = {0: {1: 3.0}, 1: {0: 3.0}}
    assert lateness.slowest(waits, range(2)) is None
    assert lateness.skew_s({0: {1: 5.0}, 1: {0: 3.0}}, 1) == 2.0


def test_on_a_ring_the_successor_alone_knows() -> None:
    found = lateness.slowest({0: {3: 0.1}, 3: {2: 6.0}}, range(4))
    assert found == lateness.Slowest(2, 6.0)
