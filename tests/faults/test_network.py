"""Links that fail without a word, between simulated hosts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import gradring
from gradring import errors
from gradring.testing import network, run_ranks, simulated_hosts
from waiting import wait_until

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


def reduce_until_lost(formed: Path) -> None:
    with gradring.init() as comm:
        comm.barrier()
        (formed / str(comm.rank)).touch()
        x = np.ones(300_000, np.float32)
        for _ in range(1_000_000):
            comm.all_reduce(x, op="mean", name="w")


@pytest.mark.slow  # it takes 10 s of silence, as a quick cell of the matrix does
def test_a_rank_whose_cable_is_pulled_is_named_by_the_others(tmp_path: Path) -> None:
    with simulated_hosts(3) as hosts, ThreadPoolExecutor() as threads:

        def cut() -> None:
            wait_until(lambda: len(list(tmp_path.iterdir())) == 3, "the group has formed")
            hosts[2].cut()

        cutting = threads.submit(cut)
        outcomes = run_ranks(reduce_until_lost, 3, tmp_path, hosts=hosts, check=False, timeout=120)
        cutting.result()
    for outcome in outcomes:
        assert isinstance(outcome.exception, errors.PeerLostError), outcome
    assert {outcome.exception.rank for outcome in outcomes[:2]} == {2}
