"""Buckets: order, bounds and dtypes. Needs neither TensorFlow nor peers."""

import random
from typing import Any

import pytest

from gradring.errors import ConfigError
from gradring.gradients import buckets
from gradring.gradients.buckets import Entry


def indices(entries: list[Entry], **bounds: int) -> Any:
    return [bucket.indices for bucket in buckets.pack(entries, **bounds)]


def test_the_first_bucket_is_small_and_the_others_fill_up() -> None:
    entries = [Entry("float32", 4)] * 6
    assert indices(entries, bucket_bytes=12, first_bucket_bytes=4) == [(0,), (1, 2, 3), (4, 5)]


def test_a_tensor_above_the_bound_travels_alone() -> None:
    entries = [Entry("float32", size) for size in (2, 100, 2, 2)]
    assert indices(entries, bucket_bytes=10, first_bucket_bytes=4) == [(0,), (1,), (2, 3)]


def test_dtypes_do_not_mix_and_buckets_come_in_the_order_they_become_ready() -> None:
    entries = [Entry("float32", 4), Entry("float16", 2), Entry("float32", 4), Entry("float16", 2)]
    packed = buckets.pack(entries)
    assert [(b.dtype, b.indices) for b in packed] == [("float32", (0, 2)), ("float16", (1, 3))]


def test_a_tensor_of_unknown_size_fills_its_bucket() -> None:
    entries = [Entry("float32", 1), Entry("float32", None), Entry("float32", 1)]
    assert indices(entries, bucket_bytes=8, first_bucket_bytes=8) == [(0,), (1,), (2,)]


def test_nothing_makes_no_bucket() -> None:
    assert buckets.pack([]) == []


@pytest.mark.parametrize("bucket_bytes", [0, -5, "x", None, float("nan")])
def test_a_bound_must_be_a_positive_number(bucket_bytes: Any) -> None:
    for use in (lambda: buckets.check(bucket_bytes), lambda: buckets.pack([], bucket_bytes)):
        with pytest.raises(ConfigError, match=f"bucket_bytes={bucket_bytes!r} is not a positive"):
            use()


def test_every_tensor_is_in_exactly_one_bucket_within_the_bound() -> None:
    seed = random.randrange(2**32)
    draw = random.Random(seed)
    for _ in range(200):
        entries = [
            Entry(draw.choice(["float32", "int64"]), draw.choice([None, 0, 1, 3, 8, 30]))
            for _ in range(draw.randrange(20))
        ]
        packed = buckets.pack(entries, bucket_bytes=10, first_bucket_bytes=5)
        flat = sorted(index for bucket in packed for index in bucket.indices)
        assert flat == list(range(len(entries))), f"seed {seed}"
        for bucket in packed:
            sizes = [entries[index].size_bytes for index in bucket.indices]
            assert {entries[index].dtype for index in bucket.indices} == {bucket.dtype}
            alone = len(sizes) == 1
            assert alone or sum(10 if s is None else s for s in sizes) <= 10, f"seed {seed}"
