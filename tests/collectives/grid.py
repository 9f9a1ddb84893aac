"""Programs of the ranks of the collectives' tests, in threads or in fresh processes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import gradring
from gradring.gradients.checks import REDUCE_OPS
from gradring.tools.bench.values import dtype_of

DTYPES = ["float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8"]
#: Rows of three elements.
LENGTHS = [0, 1, 5, 1000, 50_000]
COUNTS = [0, 1, 2, 3, 7, 64, 1000, 4097, 1 << 20]
#: Of values that have periods of 2 and 23 elements.
PERIOD = 46


def contribution(rank: int, count: int, op: str, dtype: str) -> NDArray[Any]:
    """Values that differ between neighbouring elements and ranks, and reduce without rounding.

    Sums and products of up to eight ranks stay small integers, which every dtype holds exactly;
    means come out with a fraction in floats and are rounded towards zero in integers.
    """
    index = np.arange(PERIOD)
    if op == "product":
        values = 1 + (index + rank) % 2
    else:
        values = (index + 5 * rank) % 23
        if dtype != "uint8":
            values = values - 11
    return repeated(values.astype(dtype_of(dtype)), count)


def repeated(period: NDArray[Any], count: int) -> NDArray[Any]:
    """So many elements; to compute each of them takes a thousand times as long."""
    return np.tile(period, -(-count // PERIOD))[:count]


def expectation(world_size: int, count: int, op: str, dtype: str) -> NDArray[Any]:
    """The exact result, computed in Python's and numpy's widest types."""
    return repeated(expected_period(world_size, op, dtype), count)


def expected_period(world_size: int, op: str, dtype: str) -> NDArray[Any]:
    wide = np.stack(
        [contribution(r, PERIOD, op, dtype).astype(np.float64) for r in range(world_size)]
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


def every_collective_dtype_and_count(comm: gradring.Communicator) -> list[str]:
    """Runs all collectives but the all-reduce, also as works and into memory that is there.

    Returns:
        What went wrong on this rank.
    """
    wrong = []
    root = comm.world_size - 1
    for dtype in DTYPES:
        for length in LENGTHS:
            case = Case(comm, dtype, length, root)
            for name, (x, arguments, expected) in case.calls().items():
                collective = name.partition(" ")[0]
                blocking, start = getattr(comm, collective), getattr(comm, f"{collective}_async")
                untouched = x.copy()
                results = [blocking(x.copy(), **arguments), start(x, **arguments).wait()]
                if "splits" in arguments:
                    rows_of_each = case.splits(to=comm.rank)
                    if any(splits.tolist() != rows_of_each for _, splits in results):
                        wrong.append(f"{name} {dtype} {length}: received splits")
                    results = [rows for rows, _ in results]
                elif name != "broadcast":
                    out = np.empty_like(untouched if expected is None else expected)
                    given = blocking(untouched, **arguments, out=out)
                    results += [given, start(untouched, **arguments, out=out).wait()]
                    if given is not (None if expected is None else out) or not same(x, untouched):
                        wrong.append(f"{name} {dtype} {length}: out, or its input")
                if not all(same(result, expected) for result in results):
                    wrong.append(f"{name} {dtype} {length}")
    return wrong


class Case:
    """What every collective gets and must give on one rank."""

    def __init__(self, comm: gradring.Communicator, dtype: str, length: int, root: int) -> None:
        self.rank, self.world_size, self.root = comm.rank, comm.world_size, root
        self.dtype, self.length = dtype, length

    def rows(self, rank: int, length: int) -> NDArray[Any]:
        return contribution(rank, 3 * length, "sum", self.dtype).reshape(length, 3)

    def split(self, sender: int, to: int) -> int:
        """How many rows one rank has for another: none, some, or twice as many as there are."""
        kind = (sender + 2 * to) % 4
        return (0, self.length // 3, 2 * self.length, 1)[kind]

    def splits(self, sender: int | None = None, to: int | None = None) -> list[int]:
        """Of one rank to all, or of all to one."""
        ranks = range(self.world_size)
        if sender is not None:
            return [self.split(sender, rank) for rank in ranks]
        assert to is not None
        return [self.split(rank, to) for rank in ranks]

    def divided(self, sender: int) -> list[NDArray[Any]]:
        """The rows that one rank has for each."""
        splits = self.splits(sender)
        return np.split(self.rows(sender, sum(splits)), np.cumsum(splits)[:-1])

    def calls(self) -> dict[str, tuple[NDArray[Any], dict[str, Any], NDArray[Any] | None]]:
        """By the collective's name: its input, its other arguments and its result."""
        rank, size, root, length = self.rank, self.world_size, self.root, self.length
        own, is_root = self.rows(rank, length), rank == root
        all_rows = [self.rows(r, length) for r in range(size)]
        joined = np.concatenate(all_rows)
        total = expectation(size, 3 * length, "sum", self.dtype).reshape(length, 3)
        # One part for each rank.
        parted = [np.split(self.rows(r, length * size), size) for r in range(size)]
        return {
            "reduce": (own, {"op": "sum", "root": root}, total if is_root else None),
            "reduce_scatter": (own, {"op": "sum"}, np.array_split(total, size)[rank]),
            "all_gather": (own, {}, joined),
            "gather": (own, {"root": root}, joined if is_root else None),
            "scatter": (np.concatenate(parted[rank]), {"root": root}, parted[root][rank]),
            "all_to_all": (
                np.concatenate(parted[rank]),
                {},
                np.concatenate([parted[r][rank] for r in range(size)]),
            ),
            "all_to_all with splits": (
                np.concatenate(self.divided(rank)),
                {"splits": self.splits(rank)},
                np.concatenate([self.divided(r)[rank] for r in range(size)]),
            ),
            "broadcast": (own, {"root": root}, all_rows[root]),
        }


def same(result: NDArray[Any] | None, expected: NDArray[Any] | None) -> bool:
    """Whether both are None, or equal in shape, dtype and bits."""
    if result is None or expected is None:
        return result is expected
    alike = result.shape == expected.shape and result.dtype == expected.dtype
    return alike and result.tobytes() == expected.tobytes()


def every_dtype_op_and_count(comm: gradring.Communicator) -> list[str]:
    """Runs the whole grid; returns the cells that went wrong on this rank."""
    wrong = []
    for dtype in DTYPES:
        for op in REDUCE_OPS:
            for count in COUNTS:
                x = contribution(comm.rank, count, op, dtype)
                returned = comm.all_reduce(x, op=op)
                expected = expectation(comm.world_size, count, op, dtype)
                if returned is not x or x.tobytes() != expected.tobytes():
                    wrong.append(f"{dtype} {op} {count}")
    return wrong
