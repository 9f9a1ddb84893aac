"""Buckets: order, bounds and dtypes. Needs neither TensorFlow nor peers."""

import random
from typing import Any

import pytest

from gradring.errors import ConfigError
from gradring.gradients import buckets
from gradring.gradients.buckets import Entry


@pytest.mark.parametrize(
    ("sizes", "bound", "first", "expected"),
    [
        pytest.param([4] * 6, 12, 4, [(0,), (1, 2, 3), (4, 5)], id="the first is small"),
        pytest.param([2, 100, 2, 2], 10, 4, [(0,), (1,), (2, 3)], id="above the bound is alone"),
        pytest.param([1, None, 1], 8, 8, [(0,), (1,), (2,)], id="an unknown size fills one"),
    ],
)
def test_tensors_fill_buckets_up_to_their_bounds(
    sizes: list[int | None], bound: int, first: int, expected: list[tuple[int, ...]]
) -> None:
    entries = [Entry("float32", size) for size in sizes]
    packed = buckets.pack(entries, bucket_bytes=bound, first_bucket_bytes=first)
    assert [bucket.indices for bucket in packed] == expected


def test_dtypes_do_not_mix_and_buckets_come_in_the_order_they_become_ready() -> None:
    entries = [Entry("float32", 4), Entry("float16", 2), Entry("float32", 4), Entry("float16", 2)]
    packed = buckets.pack(entries)
    assert [(b.dtype, b.indices) for b in packed] == [("float32", (0, 2)), ("float16", (1, 3))]


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
