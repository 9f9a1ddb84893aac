"""Links that fail without a word, between simulated hosts."""

from __future__ import annotations

import numpy as np
import pytest

import gradring
from gradring import errors
from gradring.testing import network, run_ranks, simulated_hosts

pytestmark = pytest.mark.skipif(
    network.why_unavailable() is not None, reason=str(network.why_unavailable())
)


def sum_over_hosts() -> tuple[str, float]:
    with gradring.init() as comm:
        x = np.full(1000, comm.rank + 1.0)
        comm.all_reduce(x)
        return comm.stats()["transport"], float(x[999])


def test_ranks_on_hosts_of_their_own_form_a_group() -> None:
    with simulated_hosts(3, rate="1gbit") as hosts:
        results = run_ranks(sum_over_hosts, 3, hosts=hosts)
    assert results == [("tcp", 6.0)] * 3


def test_memory_is_shared_inside_a_host_and_tcp_used_between_hosts() -> None:
    with simulated_hosts(2) as hosts:
        assert run_ranks(sum_over_hosts, 4, hosts=hosts) == [("shm+tcp", 10.0)] * 4


def join_over_shared_memory() -> None:
    gradring.init(transport="shm", timeout=20)


def test_shared_memory_between_hosts_is_refused_with_the_reason() -> None:
    with simulated_hosts(2) as hosts:
        outcomes = run_ranks(join_over_shared_memory, 2, hosts=hosts, check=False)
    for outcome in outcomes:
        assert isinstance(outcome.exception, errors.ConfigError), outcome
        assert "cannot share memory" in str(outcome.exception)
