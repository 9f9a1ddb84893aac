"""Buckets: gradients that travel together in one collective.

A collective costs a fixed time, whatever its size, so small gradients are fused into buckets. A
bucket starts only when its last gradient is ready. If buckets are too large, little of their
transfer overlaps with the backward pass. The backward pass produces the gradients of the last
layers first, and callers list tensors in that order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Real

from gradring.errors import ConfigError

#: Limit of a bucket, in bytes. Its transfer takes milliseconds; a collective by itself costs
#: tens of microseconds.
DEFAULT_BUCKET_BYTES = 16 * 1024 * 1024

#: Limit of the first bucket of each dtype, in bytes; smaller, so that communication begins
#: early.
FIRST_BUCKET_BYTES = 1024 * 1024


@dataclass(frozen=True)
class Entry:
    """Properties of a tensor that decide its bucket."""

    dtype: str
    #: None if the size is known only at run time; the tensor then fills its bucket.
    size_bytes: int | None


@dataclass(frozen=True)
class Bucket:
    """Tensors of one dtype that are reduced together."""

    dtype: str
    #: Positions in the list of entries, ascending.
    indices: tuple[int, ...]


def check(bucket_bytes: object) -> None:
    """Raises `gradring.errors.ConfigError` unless the argument is a number above 0."""
    is_number = isinstance(bucket_bytes, Real) and float(bucket_bytes) > 0
    if isinstance(bucket_bytes, bool) or not is_number:
        raise ConfigError(f"bucket_bytes={bucket_bytes!r} is not a positive number; correct it")


def pack(
    entries: Iterable[Entry],
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    first_bucket_bytes: int = FIRST_BUCKET_BYTES,
) -> list[Bucket]:
    """Groups tensors into buckets, in the order in which the buckets become ready.

    The result depends on the arguments alone, so all ranks get the same buckets.

    Args:
        entries: The tensors, in the order in which they become ready.
        bucket_bytes: Limit of a bucket; a larger tensor has a bucket of its own.
        first_bucket_bytes: Limit of the first bucket of each dtype.

    Returns:
        Buckets in the order in which they become ready. Every position occurs in exactly one.

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
