"""Results are what they were when they were recorded, to the last bit; `bits.py` says more."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gradring.testing import run_ranks
from support import bits
from support.chosen import marked
from support.pairs import on_threads

RECORD: dict[str, bits.Digests] = json.loads(bits.RECORD.read_text(encoding="utf-8"))
#: One that is even and one that is not.
QUICK_HOSTS = ("0 0 1", "0 1 2 0 1 2")


@pytest.mark.parametrize("order", bits.ORDERS)
@pytest.mark.parametrize("world_size", bits.WORLD_SIZES)
def test_results_have_the_recorded_bits(world_size: int, order: str) -> None:
    # Every order of sums meets both transports, at some world sizes the one, at others the other.
    transport = ["tcp", "shm"][(world_size + list(bits.ORDERS).index(order)) % 2]
    found = on_threads(world_size, bits.digests, transport=transport, **bits.ORDERS[order])
    assert found == [RECORD[f"{world_size} ranks, {order}"]] * world_size


@pytest.mark.parametrize(
    "settings",
    [{"transport": "tcp", "streams": 3}, {"transport": "shm", "checksum": True}],
    ids=["streams", "checksum"],
)
def test_neither_streams_nor_checksums_change_bits(settings: dict[str, Any]) -> None:
    assert on_threads(3, bits.digests, **settings) == [RECORD["3 ranks, auto"]] * 3


def test_the_instruction_set_changes_no_bits() -> None:
    env = {"GRADRING_KERNEL": "scalar"}
    found = run_ranks(bits.digests_of_a_process, 3, bits.ORDERS["ring"], env=env)
    assert found == [RECORD["3 ranks, ring"]] * 3


@pytest.mark.parametrize("placed", marked(bits.HOSTS, QUICK_HOSTS))
def test_several_hosts_give_the_recorded_bits(placed: str) -> None:
    assert bits.on_hosts(bits.HOSTS[placed]) == [RECORD[f"hosts {placed}"]] * len(
        bits.HOSTS[placed]
    )


def test_the_record_has_nothing_else() -> None:
    orders = {f"{n} ranks, {order}" for n in bits.WORLD_SIZES for order in bits.ORDERS}
    assert set(RECORD) == orders | {f"hosts {name}" for name in bits.HOSTS}
