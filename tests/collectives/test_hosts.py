"""Ranks that share hosts: exact results of what depends on it, and failures."""

from __future__ import annotations

import os
from typing import Any

import grid
import numpy as np
import pytest
from test_communicator import rounding
from test_numerics import wrong_sums

import gradring
from faults.test_faults import assert_lost, reduce_until_killed, survivors
from gradring.testing import run_ranks, simulated_hosts
from support.chosen import marked, marked_rows
from support.pairs import with_communicator

# The host of each rank.
TWO_OF_TWO = [0, 0, 1, 1]
TWO_IN_TURN = [0, 1, 0, 1]
THREE_IN_TURN = [0, 1, 2, 0, 1, 2]
UNEVEN = [0, 0, 1]
#: The largest, and the one that is not even.
QUICK = [THREE_IN_TURN, UNEVEN]
#: Which chooses both algorithms.
RACKS = [(r, a) for r in ("xxxxyyyyzzzz", "xyzxyzxyzxyz") for a in ("auto", "hierarchical")]
QUICK_RACKS = [("xyzxyzxyzxyz", "auto")]
HIERARCHICAL = {"GRADRING_ALGORITHM": "hierarchical"}


def run_on_hosts(fn: Any, host_of_each_rank: list[int], *args: Any, **options: Any) -> list[Any]:
    with simulated_hosts(max(host_of_each_rank) + 1) as hosts:
        placed = [hosts[host] for host in host_of_each_rank]
        return run_ranks(fn, len(placed), *args, hosts=placed, **options)


@pytest.mark.parametrize(
    "placed", marked([TWO_OF_TWO, TWO_IN_TURN, THREE_IN_TURN, UNEVEN], QUICK), ids=str
)
def test_reducing_inside_hosts_first_is_exact_on_every_rank(placed: list[int]) -> None:
    sums = grid.every_dtype_op_and_count
    wrong = run_on_hosts(with_communicator, placed, sums, env=HIERARCHICAL, timeout=270)
    assert wrong == [[]] * len(placed)


@pytest.mark.parametrize(
    "algorithm",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("ring", "direct")),
        "one_shot:64KiB,hierarchical",
    ],
)
def test_every_algorithm_is_exact_wherever_the_ranks_are(algorithm: str) -> None:
    sums, env = grid.every_dtype_op_and_count, {"GRADRING_ALGORITHM": algorithm}
    wrong = run_on_hosts(with_communicator, TWO_IN_TURN, sums, env=env, timeout=270)
    assert wrong == [[]] * 4


@pytest.mark.parametrize("placed", marked([TWO_IN_TURN, UNEVEN], [UNEVEN]), ids=str)
def test_sixteen_bit_floats_are_rounded_once(placed: list[int]) -> None:
    found = run_on_hosts(with_communicator, placed, rounding, env=HIERARCHICAL)
    assert found == [[True, True]] * len(placed)


def chosen_for_large_arrays() -> list[str]:
    """What is wrong, after the algorithm of sums of a million float32."""
    with gradring.init() as comm:
        comm.all_reduce(np.ones(1 << 20, np.float32))
        found = [str(comm.stats()["algorithm"])]
        for dtype in ("float32", "float16", "int32", "uint8"):
            for count in (1, 300, 4_097, 1_000_003):
                places = np.arange(count) % 5
                x = (places + (comm.rank == 3)).astype(dtype)
                total = (places * comm.world_size + 1).astype(dtype)
                if not np.array_equal(comm.all_reduce(x.copy()), total):
                    found.append(f"all_reduce of {count} {dtype}")
                if not np.array_equal(comm.all_reduce(x.copy(), op="max"), places + 1):
                    found.append(f"max of {count} {dtype}")
                at_root = comm.reduce(x.copy(), root=7)
                if at_root is not None and not np.array_equal(at_root, total):
                    found.append(f"reduce of {count} {dtype}")
        return found


@pytest.mark.parametrize(
    ("placed", "algorithm"),
    [
        pytest.param(
            *([rank // 4 for rank in range(16)], "halving"),
            id="4 on each of 4 hosts",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *([rank % 3 for rank in range(12)], "hierarchical"), id="4 on each of 3 hosts, in turn"
        ),
    ],
)
def test_more_than_eight_ranks_on_hosts_are_exact_by_what_auto_chooses(
    placed: list[int], algorithm: str
) -> None:
    assert run_on_hosts(chosen_for_large_arrays, placed) == [[algorithm]] * len(placed)


def in_racks(rack_of_each_rank: list[str], algorithm: str) -> list[str]:
    """What is wrong, and the algorithms of smaller and larger sums."""
    rack = rack_of_each_rank[int(os.environ["GRADRING_RANK"])]
    with gradring.init(rack=rack, algorithm=algorithm) as comm:
        found = []
        for count in (30_001, 1_000_003):
            places = np.arange(count) % 5
            x = (places + (comm.rank == 3)).astype(np.float32)
            if not np.array_equal(comm.all_reduce(x), places * comm.world_size + 1):
                found.append(f"all_reduce of {count}")
            found.append(str(comm.stats()["algorithm"]))
        return found


@pytest.mark.parametrize(("racks", "algorithm"), marked_rows(RACKS, QUICK_RACKS))
def test_hosts_in_racks_reduce_exactly(racks: str, algorithm: str) -> None:
    chosen = ["hierarchical", "ring" if algorithm == "auto" else "hierarchical"]
    placed = [rank // 2 if racks[0] == racks[1] else rank % 6 for rank in range(12)]
    found = run_on_hosts(in_racks, placed, list(racks), algorithm)
    assert found == [chosen] * 12


@pytest.mark.slow
def test_more_ranks_than_a_mesh_has_reduce_exactly_in_racks() -> None:
    placed, racks = [rank % 12 for rank in range(72)], list("xyz" * 24)
    found = run_on_hosts(in_racks, placed, racks, "auto", timeout=200)
    assert found == [["hierarchical", "ring"]] * 72


def every_other_collective() -> list[Any]:
    with gradring.init(algorithm="ring") as comm:
        scattered = comm.reduce_scatter(np.arange(7.0))
        gathered = comm.all_gather(np.full(comm.rank, comm.rank))
        copied = comm.broadcast(np.full(3, comm.rank), root=1)
        comm.barrier()
        return [scattered.tolist(), gathered.tolist(), copied.tolist()]


def test_a_ring_through_hosts_gives_every_rank_its_own() -> None:
    parts = [[0.0, 4.0], [8.0, 12.0], [16.0, 20.0], [24.0]]
    expected = [[part, [1, 2, 2, 3, 3, 3], [1, 1, 1]] for part in parts]
    assert run_on_hosts(every_other_collective, TWO_IN_TURN) == expected


def test_reproducible_sums_are_folds_wherever_the_ranks_are() -> None:
    env = {**HIERARCHICAL, "GRADRING_REPRODUCIBLE": "1"}
    wrong = run_on_hosts(with_communicator, TWO_IN_TURN, wrong_sums, env=env)
    assert wrong == [[]] * 4


def chosen_algorithms(algorithm: str) -> list[str]:
    with gradring.init(algorithm=algorithm) as comm:
        chosen = []
        for count in [1000, 1 << 20]:
            comm.all_reduce(np.ones(count, np.float32))
            chosen.append(comm.stats()["algorithm"])
        return [str(comm.local_rank), str(comm.local_size), *chosen]


def test_large_buffers_are_reduced_inside_hosts_first_by_default() -> None:
    on_hosts = run_on_hosts(chosen_algorithms, TWO_IN_TURN, "one_shot:4KiB,hierarchical")
    assert on_hosts[2] == ["1", "2", "one_shot", "hierarchical"]
    assert run_on_hosts(chosen_algorithms, TWO_IN_TURN, "auto")[3][3] == "hierarchical"
    # A host for each rank, or one for all: there are no two levels.
    assert run_on_hosts(chosen_algorithms, [0, 1, 2], "hierarchical")[0][3] == "direct"
    assert run_ranks(chosen_algorithms, 3, "hierarchical")[0][3] == "direct"


@pytest.mark.parametrize("faulty", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_a_killed_rank_is_named_on_every_host(faulty: int) -> None:
    with simulated_hosts(2) as hosts:
        arguments = (faulty, 4, faulty, 5_000_000)
        found = survivors(
            reduce_until_killed, *arguments, env=HIERARCHICAL, hosts=hosts, timeout=120
        )
    assert_lost(found, faulty)
