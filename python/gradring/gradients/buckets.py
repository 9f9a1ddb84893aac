"""Buckets: gradients that travel together.

A collective costs a fixed time, whatever its size, so small gradients are fused into buckets. A
bucket can start only when its last gradient is ready, so buckets must not be too large either, or
nothing overlaps with the rest of the backward pass. The backward pass produces the gradients of
the last layers first; callers list tensors in that order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Real

from gradring.errors import ConfigError

#: Upper bound on a bucket, in bytes. Transferring this much takes milliseconds, against tens of
#: microseconds that a collective costs by itself.
DEFAULT_BUCKET_BYTES = 16 * 1024 * 1024

#: Upper bound on the first bucket of each dtype, in bytes: communication should begin early.
FIRST_BUCKET_BYTES = 1024 * 1024


@dataclass(frozen=True)
class Entry:
    """What bucketing needs to know of a tensor."""

    dtype: str
    #: None when it is known only at run time; such a tensor fills its bucket.
    size_bytes: int | None


@dataclass(frozen=True)
class Bucket:
    """Tensors of one dtype that are reduced together."""

    dtype: str
    #: Positions in the list that was given, ascending.
    indices: tuple[int, ...]


def check(bucket_bytes: object) -> None:
    """Raises `gradring.errors.ConfigError` for an argument that cannot bound a bucket."""
    is_number = isinstance(bucket_bytes, Real) and float(bucket_bytes) > 0
    if isinstance(bucket_bytes, bool) or not is_number:
        raise ConfigError(f"bucket_bytes={bucket_bytes!r} is not a positive number; correct it")


def pack(
    entries: Iterable[Entry],
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    first_bucket_bytes: int = FIRST_BUCKET_BYTES,
) -> list[Bucket]:
    """Groups tensors into buckets, in the order in which the buckets become ready.

    The outcome depends on nothing but its arguments, so that all ranks arrive at the same one.

    Args:
        entries: The tensors, in the order in which they become ready.
        bucket_bytes: Bound on a bucket; a tensor above it has a bucket of its own.
        first_bucket_bytes: Bound on the first bucket of each dtype.

    Returns:
        Buckets; every position occurs in exactly one.

    Raises:
        gradring.errors.ConfigError: `bucket_bytes` is not a number above 0.
    """
    check(bucket_bytes)
    full: list[Bucket] = []
    filling: dict[str, list[int]] = {}
    filled_bytes: dict[str, int] = {}
    limits: dict[str, int] = {}

    def close(dtype: str) -> None:
        full.append(Bucket(dtype, tuple(filling.pop(dtype))))
        limits[dtype] = bucket_bytes

    for index, entry in enumerate(entries):
        dtype = entry.dtype
        limit = limits.setdefault(dtype, min(first_bucket_bytes, bucket_bytes))
        size_bytes = bucket_bytes if entry.size_bytes is None else entry.size_bytes
        if dtype in filling and filled_bytes[dtype] + size_bytes > limit:
            close(dtype)
            limit = limits[dtype]
        filling.setdefault(dtype, []).append(index)
        filled_bytes[dtype] = size_bytes + (filled_bytes[dtype] if len(filling[dtype]) > 1 else 0)
        if filled_bytes[dtype] >= limit:
            close(dtype)
    for dtype in list(filling):
        close(dtype)
    return sorted(full, key=lambda bucket: bucket.indices[-1])
