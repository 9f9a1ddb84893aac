"""Several TCP connections per link, and checksums, change how bytes travel, and no bit."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import grid
import numpy as np
import pytest
from test_numerics import contribution, left_fold

import gradring
from gradring.testing import run_ranks
from support.chosen import marked_rows
from support.pairs import on_threads

COUNTS = [5, 40_000, 300_001]
DTYPES = ["float32", "bfloat16"]


def digests(world_size: int, **settings: Any) -> list[dict[str, str]]:
    """On each rank: what every algorithm makes of every dtype and count; and what went wrong."""

    def of_one_algorithm(comm: gradring.Communicator) -> dict[str, str]:
        found = {
            f"{dtype}[{count}]": check(comm, dtype, count, settings.get("reproducible", False))
            for dtype in DTYPES
            for count in COUNTS
        }
        stats: Any = comm.stats()
        for name in ("transport", "streams", "checksum"):
            assert stats[name] == settings.get(name, stats[name])
        return found

    ranks: list[dict[str, str]] = [{} for _ in range(world_size)]
    for algorithm in ("ring", "direct", "one_shot"):
        found = on_threads(world_size, of_one_algorithm, algorithm=algorithm, **settings)
        for rank, by_cell in zip(ranks, found, strict=True):
            rank.update({f"{algorithm} {cell}": digest for cell, digest in by_cell.items()})
    return ranks


def check(comm: gradring.Communicator, dtype: str, count: int, reproducible: bool) -> str:
    exact = grid.contribution(comm.rank, count, "sum", dtype)
    rounded = contribution(comm.rank, count, dtype)
    works = [comm.all_reduce_async(x) for x in (exact, rounded)]
    for work in works:
        work.wait()
    gathered = comm.all_gather(comm.reduce_scatter(contribution(comm.rank, count, dtype)))
    if exact.tobytes() != grid.expectation(comm.world_size, count, "sum", dtype).tobytes():
        return "wrong"
    if reproducible:
        expected = left_fold(comm.world_size, count, dtype).tobytes()
        if not rounded.tobytes() == gathered.tobytes() == expected:
            return "not the left fold"
    root = comm.broadcast(contribution(comm.rank, count, dtype), root=comm.world_size - 1)
    if root.tobytes() != contribution(comm.world_size - 1, count, dtype).tobytes():
        return "wrong broadcast"
    return hashlib.sha256(rounded.tobytes() + gathered.tobytes()).hexdigest()


#: One plain TCP connection, and what must not differ from it.
LINKS: list[dict[str, Any]] = [
    *({"transport": "tcp", "streams": streams, "checksum": False} for streams in (1, 2, 4)),
    {"transport": "tcp", "checksum": True},
    {"transport": "tcp", "checksum": True, "streams": 3},
    {"transport": "shm", "checksum": True},
]
#: World sizes, and whether sums are reproducible.
CELLS = [(2, False), (2, True), (3, False), (3, True), (4, False), (4, True)]


@pytest.mark.parametrize(
    ("world_size", "reproducible"), marked_rows(CELLS, [(2, False), (3, True), (4, False)])
)
def test_results_have_the_same_bits_with_any_number_of_streams_and_with_checksums(
    world_size: int, reproducible: bool
) -> None:
    one, *others = (digests(world_size, reproducible=reproducible, **links) for links in LINKS)
    assert all(len(digest) == 64 for digest in one[0].values()), one[0]
    for several in (one, *others):
        assert several == [one[0]] * world_size


def rounded(comm: gradring.Communicator) -> bytes:
    x = np.random.default_rng(comm.rank).normal(size=300_001).astype(np.float32)
    return comm.all_reduce(x, op="mean").tobytes()


def test_rounded_elements_have_the_same_bits_with_checksums() -> None:
    with_and_without = [
        on_threads(3, rounded, wire_dtype="bfloat16", reproducible=True, checksum=checksum)
        for checksum in (True, False)
    ]
    assert with_and_without[0] == with_and_without[1]


def from_the_environment() -> tuple[int, bool, float]:
    with gradring.init() as comm:
        stats: Any = comm.stats()
        return stats["streams"], stats["checksum"], float(comm.all_reduce(np.ones(100_000))[-1])


@pytest.mark.parametrize(("transport", "checksum"), [("tcp", True), ("shm", False)])
def test_the_variables_are_read_and_shared_memory_not_affected(
    transport: str, checksum: bool
) -> None:
    env = {"GRADRING_STREAMS": "3", "GRADRING_CHECKSUM": str(int(checksum))}
    found = run_ranks(from_the_environment, 3, env={**env, "GRADRING_TRANSPORT": transport})
    assert found == [(3, checksum, 3.0)] * 3


def leave_first(streams: int) -> Any:
    """The root leaves with everything under way; the others come late."""
    with gradring.init(transport="tcp", streams=streams) as comm:
        if comm.rank != 0:
            time.sleep(1.0)
        return int(comm.broadcast(np.full(300_000, comm.rank + 1)).sum())


@pytest.mark.parametrize("streams", [1, pytest.param(2, marks=pytest.mark.slow), 4])
def test_what_a_rank_sent_before_it_left_arrives(streams: int) -> None:
    assert run_ranks(leave_first, 3, streams) == [300_000] * 3
