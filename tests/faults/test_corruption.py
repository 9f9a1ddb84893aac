"""A turned bit on a link: silent without checksums, with them an error that names the link."""

from __future__ import annotations

import itertools
import os
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import gradring
from faults.actor import Addresses
from faults.drill import ONE_BIT, addresses_of, own_address
from faults.proxy import Flow, Proxies, Trap
from gradring import errors
from gradring.machine.ports import free_ports
from gradring.testing import Outcome, run_ranks
from support.chosen import marked_rows

BYTES = 10 << 20
#: With one stream and several; the matrix has a ring.
QUICK = [(4, {"algorithm": "direct"}), (3, {"streams": 2, "wire_dtype": "bfloat16"})]
PORTS = itertools.count(24_000)


@dataclass(frozen=True)
class Turned:
    """What one rank saw."""

    wrong: int
    """Elements that differ from the sum."""


def reduce(addresses: list[Addresses], settings: dict[str, Any]) -> Turned:
    own = addresses[int(os.environ["GRADRING_RANK"])]
    with gradring.init(transport="tcp", timeout=60, **vars(own), **settings) as comm:
        x = np.full(BYTES // 4, comm.rank + 1.0, np.float32)
        comm.all_reduce(x, name="grads")
        comm.barrier()  # a rank far from the link may have ended the sum before the news
        total = comm.world_size * (comm.world_size + 1) / 2
        return Turned(int((x != total).sum()))


def turn_a_bit(world_size: int, after: int, **settings: Any) -> list[Outcome]:
    """Turns a bit on the link from the last rank to rank 0, behind ``after`` bytes."""
    address = own_address()
    targets = [(address, port) for port in free_ports(world_size, address)]
    turned = threading.Event()

    def link(flow: Flow) -> bool:
        return flow.purpose == "data" and flow.ends == (world_size - 1, 0)

    with Proxies(targets) as proxies:
        proxies.arm(Trap("corrupt", link, after, turned.set, mask=ONE_BIT))
        outcomes = run_ranks(
            reduce,
            world_size,
            addresses_of(targets, proxies),
            settings,
            timeout=90,
            env={"GRADRING_RENDEZVOUS": f"{address}:{next(PORTS)}"},
            check=False,
        )
    assert turned.is_set(), outcomes
    return outcomes


# The calibration of a group carries less than the first MiB of a link.
MIDDLE = BYTES // 2


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_without_checksums_a_turned_bit_is_a_wrong_sum(world_size: int) -> None:
    outcomes = turn_a_bit(world_size, MIDDLE, algorithm="ring")
    assert all(outcome.ok for outcome in outcomes), outcomes
    assert any(outcome.value.wrong for outcome in outcomes)


@pytest.mark.parametrize(
    ("world_size", "settings"),
    marked_rows(
        [
            (2, {"algorithm": "ring"}),
            (3, {"algorithm": "ring"}),
            (4, {"algorithm": "direct"}),
            (3, {"algorithm": "one_shot"}),
            (2, {"streams": 4}),
            (3, {"streams": 2, "wire_dtype": "bfloat16"}),
        ],
        QUICK,
    ),
)
def test_with_checksums_a_turned_bit_is_an_error_that_names_the_link(
    world_size: int, settings: dict[str, Any]
) -> None:
    outcomes = turn_a_bit(world_size, MIDDLE // 4, checksum=True, **settings)
    for outcome in outcomes:
        error = outcome.exception
        assert isinstance(error, errors.ProtocolError), outcome.details()
        assert error.rank == world_size - 1
        assert f"the connection from rank {world_size - 1} on " in str(error)
        assert " to rank 0 on " in str(error)
        assert " corrupted segment " in str(error)
        assert "'grads' float32[2621440] (collective #" in str(error)
        assert error.collective is not None and "grads" in error.collective
        assert isinstance(error.sequence, int)
        assert "restart the job" in str(error)
