"""Test values, the exact expectation, and the count of wrong elements.

Element ``i`` of rank ``r`` in a world of ``N`` is ``p * N + (p + r) % N`` with ``p = i % period``.
So ranks differ in every element, and all elements within a period differ. The period is odd, so
that data displaced by a chunk is detected. It is so short that the dtype holds every partial sum
exactly as an integer: the expectation does not depend on the order of additions.

Factors of a product are 1 and 2 in turn, so that it stays a small power of two.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradring.errors import ConfigError
from gradring.group.arrays import ReduceOp

#: Limit below which each dtype holds every integer; smaller if tests need no more.
LARGEST_INTEGERS = {
    "float32": 1 << 24,
    "float64": 1 << 24,
    "float16": 1 << 11,
    "bfloat16": 1 << 8,
    "int32": 1 << 24,
    "int64": 1 << 24,
    "uint8": 1 << 8,
}

SHORTEST_PERIOD = 3


@dataclass(frozen=True)
class Problem:
    """One rank's part in an all-reduce of test values; small enough for a pipe.

    Attributes:
        rank: The rank.
        world_size: Number of ranks.
        count: Elements of the buffer on each rank.
        op: The reduce op.
        dtype: Element type by numpy's name.
    """

    rank: int
    world_size: int
    count: int
    op: ReduceOp
    dtype: str

    @property
    def bytes(self) -> int:
        """Size of the buffer on each rank."""
        return self.count * dtype_of(self.dtype).itemsize

    @property
    def link_bytes(self) -> int:
        """Bytes that a ring sends over each link: 2(N-1)/N of the buffer."""
        return self.bytes * 2 * (self.world_size - 1) // self.world_size

    def source(self) -> NDArray[Any]:
        """Returns the rank's contribution as a new array."""
        return self._repeated(self._wide(self.rank).astype(dtype_of(self.dtype)))

    def expected(self) -> NDArray[Any]:
        """Returns the exact result as a new array, computed in 64-bit integers.

        The mean is the sum times 1/N in the dtype's accumulator, and in integers the quotient
        rounded towards zero.
        """
        merge = {"min": np.minimum, "max": np.maximum, "product": np.multiply}.get(self.op, np.add)
        wide: NDArray[Any] = functools.reduce(merge, map(self._wide, range(self.world_size)))
        target = dtype_of(self.dtype)
        if self.op == "mean" and target.kind in "iu":
            wide = wide // self.world_size
        elif self.op == "mean":
            accumulator = np.float64 if self.dtype == "float64" else np.float32
            wide = wide.astype(accumulator) * accumulator(1 / accumulator(self.world_size))
        return self._repeated(wide.astype(target))

    def _wide(self, rank: int) -> NDArray[np.int64]:
        """Returns one period of a rank's contribution."""
        index = np.arange(min(self.count, period(self.dtype, self.world_size)), dtype=np.int64)
        if self.op == "product":
            return 1 + (index + rank) % 2
        return index * self.world_size + (index + rank) % self.world_size

    def _repeated(self, pattern: NDArray[Any]) -> NDArray[Any]:
        return np.resize(pattern, self.count)


def dtype_of(name: str) -> np.dtype[Any]:
    """Returns the numpy dtype of a name in `LARGEST_INTEGERS`.

    Raises:
        ConfigError: The dtype is bfloat16, and ml_dtypes is not installed.
    """
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        raise ConfigError("numpy has no bfloat16 of its own; run: pip install ml_dtypes") from None
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


def period(dtype: str, world_size: int) -> int:
    """Returns the number of elements after which the values repeat.

    Raises:
        ConfigError: The dtype is too narrow for distinct values of this number of ranks.
    """
    longest = LARGEST_INTEGERS[dtype] // world_size**2
    if longest < SHORTEST_PERIOD:
        raise ConfigError(
            f"the sum of {world_size} ranks' test values is not exact in {dtype}; "
            "use a wider dtype or fewer ranks"
        )
    return longest - 1 + longest % 2


def count_wrong(result: NDArray[Any], expected: NDArray[Any]) -> int:
    """Returns the number of elements that differ in any bit; all if the sizes or dtypes differ."""
    if result.size != expected.size or result.dtype != expected.dtype:
        return expected.size
    bits = np.dtype(f"u{expected.dtype.itemsize}")
    return int(np.count_nonzero(result.reshape(-1).view(bits) != expected.view(bits)))
