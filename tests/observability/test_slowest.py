"""The rank that keeps others waiting is named, on every rank, and ranks that are even are not."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

import gradring
from gradring import lateness
from gradring.testing import run_ranks

LATE_S = 0.05
STEPS = 30


def late_rank(late: int, algorithm: str) -> dict[str, Any]:
    with gradring.init(algorithm=algorithm) as comm:
        x = np.ones(1000, np.float32)
        for _ in range(STEPS):
            if comm.rank == late:
                time.sleep(LATE_S)
            comm.all_reduce(x, name="g")
        # What the others saw arrives about once a second.
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            stats = comm.stats()
            if stats["slowest"] and stats["slowest"]["made_wait_s"] > 0.8 * STEPS * LATE_S:
                break
            time.sleep(0.1)
        comm.barrier()
        return {**stats, "host": comm.host}


@pytest.mark.parametrize("algorithm", ["one_shot", "direct", "ring"])
def test_every_rank_names_the_late_one(algorithm: str) -> None:
    late = 2
    for rank, stats in enumerate(run_ranks(late_rank, 4, late, algorithm)):
        slowest = stats["slowest"]
        assert slowest["rank"] == late
        assert slowest["host"] == stats["host"]
        assert slowest["made_wait_s"] > 0.8 * STEPS * LATE_S
        hears_it = algorithm != "ring" or rank == (late + 1) % 4
        if rank != late and hears_it:
            assert stats["lateness_s"][late] > 0.8 * STEPS * LATE_S
            assert stats["lateness_recent_s"][late] > 0


def test_ranks_that_are_late_in_turn_come_out_even() -> None:
    waits = {0: {1: 3.0}, 1: {0: 3.0}}
    assert lateness.slowest(waits, range(2)) is None
    assert lateness.excess_s({0: {1: 5.0}, 1: {0: 3.0}}, 1) == 2.0


def test_on_a_ring_the_successor_alone_knows() -> None:
    found = lateness.slowest({0: {3: 0.1}, 3: {2: 6.0}}, range(4))
    assert found == lateness.Slowest(2, 6.0)
