"""Bits: of reproducible sums, of 16-bit wire formats, and the same on all ranks."""

from __future__ import annotations

import os
import re
from functools import cache, partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import gradring
from gradring import errors
from gradring.testing import run_ranks
from gradring.tools.bench.values import dtype_of
from support.pairs import on_threads

COUNTS = [1, 5, 1000, 300_001]
NARROWED_FROM = (64 << 10) // 4
ALGORITHMS = ["auto", "ring", "direct", "one_shot", "star", "one_shot:1KiB,direct:64KiB,ring"]


def contribution(rank: int, count: int, dtype: str = "float32") -> NDArray[Any]:
    """Numbers of many magnitudes and both signs, so that every order of addition shows."""
    return np.array(_contribution(rank, count, dtype))


@cache
def _contribution(rank: int, count: int, dtype: str) -> NDArray[Any]:
    random = np.random.default_rng(1000 * rank + count)
    wide = random.standard_normal(count) * 10.0 ** random.integers(-3, 4, count)
    values: NDArray[Any] = wide.astype(dtype_of(dtype))
    return values


@cache
def left_fold(world_size: int, count: int, dtype: str) -> NDArray[Any]:
    """g0 + g1 + ... + gN-1, in the type in which gradring accumulates, rounded once."""
    accumulator = np.float64 if dtype == "float64" else np.float32
    total = contribution(0, count, dtype).astype(accumulator)
    for rank in range(1, world_size):
        total += contribution(rank, count, dtype).astype(accumulator)
    return total.astype(contribution(0, 1, dtype).dtype)


def wrong_sums(comm: gradring.Communicator, dtype: str = "float32") -> list[str]:
    wrong = []
    for count in COUNTS:
        expected = left_fold(comm.world_size, count, dtype).tobytes()
        whole = comm.all_reduce(contribution(comm.rank, count, dtype))
        bucket = np.array_split(contribution(comm.rank, count, dtype), 3)
        bucket = [np.array(part) for part in bucket]
        comm.all_reduce(bucket)
        scattered = comm.reduce_scatter(contribution(comm.rank, count, dtype))
        gathered = comm.all_gather(scattered)
        results = {"whole": whole, "bucket": np.concatenate(bucket), "scattered": gathered}
        wrong += [f"{count} {how}" for how, x in results.items() if x.tobytes() != expected]
    return wrong


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_reproducible_sum_is_the_left_fold_in_rank_order(world_size: int, algorithm: str) -> None:
    wrong = on_threads(world_size, wrong_sums, algorithm=algorithm, reproducible=True)
    assert wrong == [[]] * world_size


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_it_is_so_for_every_float(dtype: str) -> None:
    assert on_threads(3, partial(wrong_sums, dtype=dtype), reproducible=True) == [[]] * 3


def wrong_narrow_sums(comm: gradring.Communicator, wire_dtype: str) -> list[Any]:
    narrow = np.dtype(ml_dtypes.bfloat16) if wire_dtype == "bfloat16" else np.dtype(wire_dtype)
    wrong: list[Any] = []
    for count in [*COUNTS, NARROWED_FROM - 1, NARROWED_FROM]:
        wire = narrow if count >= NARROWED_FROM else np.dtype(np.float32)
        sent_before = comm.stats()["bytes_sent"]
        x = comm.all_reduce(contribution(comm.rank, count))
        sent = comm.stats()["bytes_sent"] - sent_before
        total = contribution(0, count).astype(wire).astype(np.float32)
        for rank in range(1, comm.world_size):
            total += contribution(rank, count).astype(wire).astype(np.float32)
        if x.tobytes() != total.astype(wire).astype(np.float32).tobytes():
            wrong.append(count)
        if sent > 2 * count * wire.itemsize * (comm.world_size - 1):
            wrong.append((count, sent))
    exact = comm.all_reduce(np.array([1 + 1e-12]))
    if exact[0] != comm.world_size * (1 + 1e-12):
        wrong.append("float64 was rounded")
    return wrong


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("wire_dtype", ["bfloat16", "float16"])
def test_a_16_bit_wire_format_rounds_contributions_and_result_once_if_they_are_large(
    world_size: int, wire_dtype: str
) -> None:
    fn = partial(wrong_narrow_sums, wire_dtype=wire_dtype)
    wrong = on_threads(world_size, fn, wire_dtype=wire_dtype, reproducible=True)
    assert wrong == [[]] * world_size


def bytes_sent(comm: gradring.Communicator, dtype: str) -> int:
    comm.all_reduce(contribution(comm.rank, 1 << 20, dtype))
    return comm.stats()["bytes_sent"]


def test_half_precision_travels_in_half_the_bytes() -> None:
    assert on_threads(2, partial(bytes_sent, dtype="bfloat16")) == [2 << 20] * 2
    assert on_threads(2, partial(bytes_sent, dtype="float32")) == [4 << 20] * 2


def different_settings(setting: str, of_rank_1: Any) -> None:
    settings = {setting: of_rank_1} if os.environ["GRADRING_RANK"] == "1" else {}
    gradring.init(timeout=20, **settings)


@pytest.mark.parametrize(
    ("setting", "of_rank_1", "told"),
    [
        (
            "reproducible",
            True,
            "was started with reproducible=true, rank 0 with reproducible=false[ ;]",
        ),
        ("streams", 2, "was started with streams=2, rank 0 with streams=1[ ;]"),
        ("checksum", True, "was started with checksum=true, rank 0 with checksum=false[ ;]"),
    ],
)
def test_ranks_with_different_settings_do_not_form_a_group(
    setting: str, of_rank_1: Any, told: str
) -> None:
    for outcome in run_ranks(different_settings, 3, setting, of_rank_1, check=False):
        assert isinstance(outcome.exception, errors.ConfigError), outcome
        assert outcome.exception.rank == 1
        assert re.search(told, str(outcome.exception))
