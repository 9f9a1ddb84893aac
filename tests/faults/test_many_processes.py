"""128 processes on one machine: they form a group, reduce, lose one, and all say which."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import pytest

import gradring
from gradring.errors import PeerLostError

RANKS = 128
VICTIM = 77


def rank() -> dict[str, Any]:
    """Times are of this rank; the results are compared here."""
    called = time.monotonic()
    comm = gradring.init(timeout=120)
    formed = time.monotonic()
    x = np.arange(10_000, dtype=np.int64)
    np.testing.assert_array_equal(comm.all_reduce(x + comm.rank), RANKS * x + sum(range(RANKS)))
    np.testing.assert_array_equal(comm.all_gather(np.array([comm.rank])), np.arange(RANKS))
    np.testing.assert_array_equal(comm.broadcast(x * comm.rank, root=VICTIM), x * VICTIM)
    assert comm.reduce_scatter(np.arange(RANKS)).tolist() == [comm.rank * RANKS]
    assert comm.all_gather_object(comm.rank) == list(range(RANKS))
    comm.barrier()
    reduced = time.monotonic()
    if comm.rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError) as caught:
        comm.all_reduce(x)
    told = time.monotonic()
    return {
        "algorithm": comm.stats()["algorithm"],
        "lost": caught.value.rank,
        "seconds": [formed - called, reduced - formed, told - reduced],
    }


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["tcp", "auto"])
def test_128_processes_form_reduce_lose_one_and_all_name_it(transport: str) -> None:
    outcomes = gradring.testing.run_ranks(
        rank, RANKS, timeout=240, env={"GRADRING_TRANSPORT": transport}, check=False
    )
    said = [outcome.value for outcome in outcomes if outcome.rank != VICTIM]
    assert [one["lost"] for one in said] == [VICTIM] * (RANKS - 1), outcomes[0]
    forming, reducing, telling = (
        max(of) for of in zip(*(one["seconds"] for one in said), strict=True)
    )
    print(
        f"{RANKS} processes over {transport}: formed in {forming:.1f} s, reduced in "
        f"{reducing:.1f} s, all told after {telling:.1f} s"
    )
