"""What the ranks of the collectives' tests run; imported by fresh processes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import gradring
from gradring.bench.values import dtype_of
from gradring.gradients.reduction import REDUCE_OPS

DTYPES = ["float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8"]
COUNTS = [0, 1, 2, 3, 7, 64, 1000, 4097, 1 << 20]


def contribution(rank: int, count: int, op: str, dtype: str) -> NDArray[Any]:
    """Values that differ between neighbouring elements and ranks, and reduce without rounding.

    Sums and products of up to eight ranks stay small integers, which every dtype holds exactly;
    means come out with a fraction in floats and are rounded towards zero in integers.
    """
    index = np.arange(count)
    if op == "product":
        values = 1 + (index + rank) % 2
    else:
        values = (index + 5 * rank) % 23
        if dtype != "uint8":
            values = values - 11
    return values.astype(dtype_of(dtype))


def expectation(world_size: int, count: int, op: str, dtype: str) -> NDArray[Any]:
    """The exact result, computed in Python's and numpy's widest types."""
    wide = np.stack(
        [contribution(r, count, op, dtype).astype(np.float64) for r in range(world_size)]
    )
    if op == "mean":
        exact: NDArray[Any] = wide.sum(axis=0)
        if dtype in ("int32", "int64", "uint8"):
            return np.trunc(exact / world_size).astype(dtype_of(dtype))
        # The sum times 1/N in the accumulator's type, rounded once to the result's.
        accumulator = np.float64 if dtype == "float64" else np.float32
        scaled: NDArray[Any] = exact.astype(accumulator) * accumulator(1 / accumulator(world_size))
        return scaled.astype(dtype_of(dtype))
    reduce = {"sum": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply}[op]
    exact = reduce.reduce(wide, axis=0)
    return exact.astype(dtype_of(dtype))


def every_dtype_op_and_count(algorithm: str = "auto") -> list[str]:
    """Runs the whole grid; returns the cells that went wrong on this rank."""
    wrong = []
    with gradring.init(algorithm=algorithm) as comm:
        for dtype in DTYPES:
            for op in REDUCE_OPS:
                for count in COUNTS:
                    x = contribution(comm.rank, count, op, dtype)
                    returned = comm.all_reduce(x, op=op)
                    expected = expectation(comm.world_size, count, op, dtype)
                    if returned is not x or x.tobytes() != expected.tobytes():
                        wrong.append(f"{dtype} {op} {count}")
    return wrong
