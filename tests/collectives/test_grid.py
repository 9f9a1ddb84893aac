"""Every dtype, op, count and world size against the exact expectation."""

from __future__ import annotations

import grid
import pytest

from gradring.testing import run_ranks

#: Those that need no hosts.
ALGORITHMS = ["ring", "two_rings", "direct", "one_shot", "star", "halving", "doubling"]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_every_dtype_op_and_count_is_exact_on_every_rank(world_size: int) -> None:
    wrong = run_ranks(grid.every_dtype_op_and_count, world_size, timeout=240)
    assert wrong == [[]] * world_size


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_every_collective_and_dtype_is_exact_on_every_rank(world_size: int) -> None:
    wrong = run_ranks(grid.every_collective_dtype_and_count, world_size, timeout=240)
    assert wrong == [[]] * world_size


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_does_every_collective_exactly(algorithm: str, transport: str) -> None:
    env = {"GRADRING_TRANSPORT": transport}
    assert run_ranks(grid.every_collective_dtype_and_count, 3, algorithm, env=env) == [[]] * 3


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_is_exact_on_every_rank(algorithm: str, transport: str) -> None:
    env = {"GRADRING_TRANSPORT": transport}
    assert run_ranks(grid.every_dtype_op_and_count, 3, algorithm, env=env) == [[]] * 3


def test_the_expectation_itself_is_what_arithmetic_says() -> None:
    assert grid.expectation(2, 3, "sum", "int32").tolist() == [-17, -15, -13]
    assert grid.expectation(2, 3, "mean", "int32").tolist() == [-8, -7, -6]
    assert grid.expectation(3, 3, "product", "float16").tolist() == [2, 4, 2]
    assert grid.expectation(2, 3, "min", "uint8").tolist() == [0, 1, 2]
