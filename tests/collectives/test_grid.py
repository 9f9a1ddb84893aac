"""Every dtype, op, count and world size against the exact expectation."""

from __future__ import annotations

import grid
import pytest

from gradring import _native
from gradring.testing import run_ranks
from support.chosen import marked, marked_rows
from support.pairs import on_threads, with_communicator

#: Those that need no hosts.
ALGORITHMS = [name for name in _native.ALGORITHMS if name != "hierarchical"]
CASES = [(algorithm, transport) for algorithm in ALGORITHMS for transport in ("tcp", "shm")]
#: Each algorithm over one transport in one of the tests, and over the other in the other test.
QUICK = [(algorithm, ("tcp", "shm")[n % 2]) for n, algorithm in enumerate(ALGORITHMS)]
QUICK_SUMS = [case for case in CASES if case not in QUICK]
WORLD_SIZES = (1, 2, 3, 4, 7)
#: The cases above have three ranks.
QUICK_WORLD_SIZES = (1, 2, 4)


@pytest.mark.parametrize("world_size", marked(WORLD_SIZES, QUICK_WORLD_SIZES))
def test_every_dtype_op_and_count_is_exact_on_every_rank(world_size: int) -> None:
    wrong = run_ranks(with_communicator, world_size, grid.every_dtype_op_and_count, timeout=240)
    assert wrong == [[]] * world_size


@pytest.mark.parametrize("world_size", marked(WORLD_SIZES, QUICK_WORLD_SIZES))
def test_every_collective_and_dtype_is_exact_on_every_rank(world_size: int) -> None:
    wrong = on_threads(world_size, grid.every_collective_dtype_and_count)
    assert wrong == [[]] * world_size


@pytest.mark.parametrize(("algorithm", "transport"), marked_rows(CASES, QUICK))
def test_every_algorithm_does_every_collective_exactly(algorithm: str, transport: str) -> None:
    settings = {"algorithm": algorithm, "transport": transport}
    assert on_threads(3, grid.every_collective_dtype_and_count, **settings) == [[]] * 3


@pytest.mark.parametrize(("algorithm", "transport"), marked_rows(CASES, [("ring", "shm")]))
def test_every_algorithm_does_every_collective_exactly_between_processes(
    algorithm: str, transport: str
) -> None:
    env = {"GRADRING_ALGORITHM": algorithm, "GRADRING_TRANSPORT": transport}
    collectives = grid.every_collective_dtype_and_count
    wrong = run_ranks(with_communicator, 3, collectives, env=env, timeout=240)
    assert wrong == [[]] * 3


@pytest.mark.parametrize(("algorithm", "transport"), marked_rows(CASES, QUICK_SUMS))
def test_every_algorithm_is_exact_on_every_rank(algorithm: str, transport: str) -> None:
    settings = {"algorithm": algorithm, "transport": transport}
    assert on_threads(3, grid.every_dtype_op_and_count, **settings) == [[]] * 3


def test_the_expectation_itself_is_what_arithmetic_says() -> None:
    assert grid.expectation(2, 3, "sum", "int32").tolist() == [-17, -15, -13]
    assert grid.expectation(2, 3, "mean", "int32").tolist() == [-8, -7, -6]
    assert grid.expectation(3, 3, "product", "float16").tolist() == [2, 4, 2]
    assert grid.expectation(2, 3, "min", "uint8").tolist() == [0, 1, 2]
