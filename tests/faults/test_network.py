"""Links that fail without a word, between simulated hosts."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import gradring
from gradring import errors
from gradring.testing import network, run_ranks, simulated_hosts

pytestmark = pytest.mark.skipif(
    network.why_unavailable() is not None, reason=str(network.why_unavailable())
)


def addresses() -> tuple[str, float]:
    with gradring.init() as comm:
        x = np.full(1000, comm.rank + 1.0)
        comm.all_reduce(x)
        return comm.host, float(x[999])


def test_ranks_on_hosts_of_their_own_form_a_group() -> None:
    with simulated_hosts(3, rate="1gbit") as hosts:
        results = run_ranks(addresses, 3, hosts=hosts)
    assert [total for _, total in results] == [6.0] * 3


def reduce_until_lost() -> None:
    with gradring.init() as comm:
        x = np.ones(300_000, np.float32)
        for _ in range(1_000_000):
            comm.all_reduce(x, op="mean", name="w")


def test_a_rank_whose_cable_is_pulled_is_named_by_the_others() -> None:
    with simulated_hosts(3) as hosts:
        cut = threading.Timer(4.0, hosts[2].cut)
        cut.start()
        outcomes = run_ranks(reduce_until_lost, 3, hosts=hosts, check=False, timeout=60)
        cut.join()
    for outcome in outcomes:
        assert isinstance(outcome.exception, errors.PeerLostError), outcome
    assert {outcome.exception.rank for outcome in outcomes[:2]} == {2}
