"""Pickles, which can run code where they are opened: only where no stranger can be a rank."""

from __future__ import annotations

import os
import warnings
from fractions import Fraction
from typing import Any

import pytest

import gradring
from gradring.errors import ConfigError
from gradring.testing import network, run_ranks, simulated_hosts
from pairs import on_threads

#: On the hosts of `simulated_hosts`.
needs_hosts = pytest.mark.skipif(
    network.why_unavailable() is not None, reason=str(network.why_unavailable())
)


def exchange(token: str | None) -> list[Any]:
    del os.environ["GRADRING_TOKEN"]
    warnings.simplefilter("ignore", UserWarning)  # about the token that is not there
    with gradring.init(token=token) as comm:
        said = []
        for call in (comm.broadcast_object, comm.all_gather_object):
            try:
                said.append(call(Fraction(1, 3), pickle=True))
            except ConfigError as error:
                said.append((error.rank, error.host == comm.host, str(error)))
        return [*said, comm.all_gather_object("JSON")]


@needs_hosts
@pytest.mark.parametrize("count", [1, 2])
def test_without_a_token_nothing_is_unpickled_where_others_reach_the_ports(count: int) -> None:
    """Also on one host: a stranger's rank says that it is there."""
    with simulated_hosts(count) as hosts:
        found = run_ranks(exchange, 2, None, hosts=[hosts[0], hosts[-1]])
    for rank, (broadcast, gathered, plain) in enumerate(found):
        for said, name in ((broadcast, "broadcast_object"), (gathered, "all_gather_object")):
            assert said[:2] == (rank, True)
            assert (
                said[2].startswith(f"{name}: a pickle can run code")
                and "set GRADRING_TOKEN" in said[2]
            )
        assert plain == ["JSON", "JSON"], "the group goes on"


@needs_hosts
def test_with_a_token_pickles_travel_between_hosts() -> None:
    with simulated_hosts(2) as hosts:
        found = run_ranks(exchange, 2, "secret", hosts=hosts)
    assert found == [[Fraction(1, 3), [Fraction(1, 3)] * 2, ["JSON", "JSON"]]] * 2


def test_on_the_loopback_of_one_machine_nobody_needs_a_token() -> None:
    def sent(comm: gradring.Communicator) -> Any:
        return comm.all_gather_object(Fraction(comm.rank), pickle=True)

    assert on_threads(2, sent) == [[Fraction(0), Fraction(1)]] * 2
