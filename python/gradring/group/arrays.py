"""Calls of collectives over a program's arrays, which are checked before anything is sent."""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from gradring import _native
from gradring.config.words import counted
from gradring.errors import ConfigError

T = TypeVar("T")
ReduceOp: TypeAlias = Literal["sum", "mean", "min", "max", "product"]
"""The name of a reduce op, which combines the ranks' elements at one position into one.

``mean`` is the sum divided by the number of ranks. `Communicator` documents rounding and overflow.

Examples:
    >>> def reduced(op: gradring.ReduceOp) -> float:
    ...     return comm.all_reduce(rank + 1.0, op)
    >>> reduced("sum"), reduced("mean"), reduced("min"), reduced("max"), reduced("product")
    (3.0, 1.5, 1.0, 2.0, 2.0)
"""


@dataclass(slots=True)
class Call(Generic[T]):
    """A prepared collective, to run or to start.

    Attributes:
        collective: The operation.
        arrays: The memory that it reads and writes.
        result: The program's return value.
        shape: Compared across ranks if the shapes of `arrays` can differ. None: the shapes are.
    """

    collective: _native.Collective
    arrays: object
    result: T
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Place:
    """This rank and the number of ranks."""

    rank: int
    world_size: int

    def rows(self, length: int) -> slice:
        """Returns this rank's rows of a first axis, divided as by ``numpy.array_split``."""
        start = sum(split(length, self.world_size)[: self.rank])
        return slice(start, start + split(length, self.world_size)[self.rank])

    def equal_rows(self, array: NDArray[Any], of: str) -> slice:
        """Returns this rank's rows if every rank has equally many.

        Raises:
            ValueError: The first axis does not divide evenly.
        """
        if array.shape[0] % self.world_size:
            raise ValueError(
                f"{of}: a first axis of length {array.shape[0]} has no {self.world_size} "
                "equal parts, one for each rank; pad the array, or reshape it"
            )
        return self.rows(array.shape[0])


@functools.cache
def all_reducing(op: ReduceOp) -> _native.Collective:
    """Returns the all-reduce of this op; cached, because programs start many."""
    return _native.Collective.all_reduce(op)


def broadcast(x: T, root: int, place: Place) -> Call[T]:
    """Returns the call of `Communicator.broadcast`."""
    check_root(root, place.world_size, "broadcast")
    return Call(_native.Collective.broadcast(root), x, x)


def reduce(
    x: Any, op: ReduceOp, root: int, out: NDArray[Any] | None, place: Place
) -> Call[NDArray[Any] | None]:
    """Returns the call of `Communicator.reduce`."""
    check_root(root, place.world_size, "reduce")
    array = travelling(x, min_dims=0)
    memory = _result(out, array.shape, array.dtype, "reduce")
    if memory is not array:
        memory[...] = array
    result = memory if place.rank == root else None
    return Call(_native.Collective.reduce(op, root), memory, result)


def reduce_scatter(
    x: Any, op: ReduceOp, out: NDArray[Any] | None, place: Place
) -> Call[NDArray[Any]]:
    """Returns the call of `Communicator.reduce_scatter`."""
    array = travelling(x)
    rows = place.rows(array.shape[0])
    counts = [length * row_size(array) for length in split(array.shape[0], place.world_size)]
    collective = _native.Collective.reduce_scatter(op, counts)
    shape = (rows.stop - rows.start, *array.shape[1:])
    result = _result(out, shape, array.dtype, "reduce_scatter")
    # This rank's rows are reduced in `result`, the other rows in copies: `x` must not change.
    others = array[: rows.start].copy(), array[rows.stop :].copy()
    result[...] = array[rows]
    return Call(collective, [others[0], result, others[1]], result, array.shape)


def all_gather(
    array: NDArray[Any], lengths: Sequence[int], out: NDArray[Any] | None, place: Place
) -> Call[NDArray[Any]]:
    """Returns the call of `Communicator.all_gather`, given the lengths of the first axes."""
    shape = (sum(lengths), *array.shape[1:])
    gathered = _result(out, shape, array.dtype, "all_gather")
    start = sum(lengths[: place.rank])
    gathered[start : start + array.shape[0]] = array
    counts = [length * row_size(array) for length in lengths]
    return Call(_native.Collective.all_gather(counts), gathered, gathered)


def all_gather_of_equals(x: Any, out: NDArray[Any] | None, place: Place) -> Call[NDArray[Any]]:
    """Returns the call of `Communicator.all_gather_async`."""
    array = travelling(x)
    return all_gather(array, [array.shape[0]] * place.world_size, out, place)


def gather(x: Any, root: int, out: NDArray[Any] | None, place: Place) -> Call[NDArray[Any] | None]:
    """Returns the call of `Communicator.gather`."""
    check_root(root, place.world_size, "gather")
    array = travelling(x)
    collective = _native.Collective.gather(root, array.size)
    if place.rank != root:
        return Call(collective, _sendable(array), None, array.shape)
    shape = (array.shape[0] * place.world_size, *array.shape[1:])
    gathered = _result(out, shape, array.dtype, "gather")
    gathered[place.rows(shape[0])] = array
    return Call(collective, gathered, gathered, array.shape)


def scatter(x: Any, root: int, out: NDArray[Any] | None, place: Place) -> Call[NDArray[Any]]:
    """Returns the call of `Communicator.scatter`."""
    check_root(root, place.world_size, "scatter")
    if x is None and place.rank != root and out is not None:
        _check_plain(out, "scatter")
        shape = (out.shape[0] * place.world_size, *out.shape[1:]) if out.ndim else ()
        # Only its shape and dtype count.
        x = np.broadcast_to(np.zeros((), out.dtype), shape)
    array = travelling(x)
    rows = place.equal_rows(array, "scatter")
    shape = (rows.stop - rows.start, *array.shape[1:])
    result = _result(out, shape, array.dtype, "scatter")
    collective = _native.Collective.scatter(root, result.size)
    if place.rank != root:
        return Call(collective, result, result, array.shape)
    sent = _sendable(array)
    if np.may_share_memory(sent, result):  # or the copy below would overwrite rows to be sent
        sent = sent.copy()
    result[...] = sent[rows]
    return Call(collective, sent, result, array.shape)


def all_to_all(x: Any, out: NDArray[Any] | None, place: Place) -> Call[NDArray[Any]]:
    """Returns the call of `Communicator.all_to_all`."""
    array = travelling(x)
    rows = place.equal_rows(array, "all_to_all")
    received = _result(out, array.shape, array.dtype, "all_to_all")
    if out is not None and np.shares_memory(array, out):
        raise ValueError("all_to_all: out and x share memory; pass another array, or none")
    received[rows] = array[rows]
    collective = _native.Collective.all_to_all()
    return Call(collective, [_sendable(array), received], received, array.shape)


def parted(
    x: Any, splits: Any, out: NDArray[Any] | None, place: Place
) -> tuple[NDArray[Any], list[int]]:
    """Returns the array to send and the number of rows for each rank, once checked.

    Raises:
        TypeError: The splits are not integers, or the dtype of ``x`` is not supported.
        ValueError: The sum of the splits is not the number of rows; or ``out`` is given; or a
            running work uses the memory of ``x``.
    """
    array = travelling(x)
    given = contents(splits)
    if given.shape != (place.world_size,):
        raise ValueError(
            f"all_to_all: splits have shape {given.shape}; give one for each of "
            f"{counted(place.world_size, 'rank')}"
        )
    rows: list[int]
    if given.dtype.kind in "iu":
        rows = given.tolist()
    elif given.dtype.kind == "f" and _are_integers(splits):
        # A list of uint64 and signed integers becomes an array of floats in numpy.
        rows = [int(each) for each in splits]
    else:
        raise TypeError(f"all_to_all: splits are of {given.dtype}; give integers")
    if min(rows) < 0:
        raise ValueError(
            f"all_to_all: splits={rows} would give a rank less than no rows; give each at least 0"
        )
    if sum(rows) != array.shape[0]:
        raise ValueError(
            f"all_to_all: splits={rows} add up to {sum(rows)}, and x has {array.shape[0]} rows"
        )
    if out is not None:
        raise ValueError(
            "all_to_all: splits cannot be combined with out, since the shape of the result is "
            "unknown until all ranks have sent their splits; leave out one of them"
        )
    array = _sendable(array)
    _native.check_unused(array)  # before the splits are sent
    return array, rows


def _are_integers(splits: Any) -> bool:
    """Returns True for a list or tuple of Python or numpy integers."""
    is_list = isinstance(splits, list | tuple)
    return is_list and all(isinstance(each, int | np.integer) for each in splits)


def all_to_all_v(
    array: NDArray[Any],
    sent: Sequence[int],
    result: NDArray[Any],
    rows: Sequence[int],
    received: list[int],
    place: Place,
) -> Call[tuple[NDArray[Any], NDArray[np.int64]]]:
    """Returns the call of `Communicator.all_to_all` with splits, after the exchange of all splits.

    Args:
        array: Rows to send.
        sent: Rows for each rank.
        result: Memory for the received rows.
        rows: Rows from each rank.
        received: Elements from each rank.
        place: This rank.
    """
    start, own = sum(rows[: place.rank]), sum(sent[: place.rank])
    length = sent[place.rank]
    result[start : start + length] = array[own : own + length]
    of_each = [length * row_size(array) for length in sent]
    collective = _native.Collective.all_to_all_v(of_each, received)
    results = result, np.array(rows, np.int64)
    return Call(collective, [array, result], results, array.shape[1:])


def send(x: Any, dest: int, place: Place) -> Call[None]:
    """Returns the call of `Communicator.send`."""
    _check_other(dest, "dest", place, "send")
    arrays = x if isinstance(x, list | tuple) else [x]
    sent = [_sendable(travelling(array, min_dims=0)) for array in arrays]
    return Call(_sending(int(dest)), sent, None)


def receive(x: T, source: int, place: Place) -> Call[T]:
    """Returns the call of `Communicator.recv`."""
    _check_other(source, "source", place, "recv")
    return Call(_receiving(int(source)), x, x)


@functools.cache
def _sending(dest: int) -> _native.Collective:
    return _native.Collective.send(dest)


@functools.cache
def _receiving(source: int) -> _native.Collective:
    return _native.Collective.receive(source)


def _check_other(rank: int, argument: str, place: Place, of: str) -> None:
    """Raises ValueError if ``rank`` is not another rank."""
    is_rank = _is_rank(rank, place.world_size)
    if is_rank and rank != place.rank:
        return
    why = f"this rank itself, {rank}" if is_rank else f"not a rank of a world of {place.world_size}"
    raise ValueError(f"{of}: {argument}={rank!r} is {why}; choose another rank")


def check_root(root: int, world_size: int, of: str) -> None:
    """Raises ValueError if ``root`` is not a rank."""
    if not _is_rank(root, world_size):
        raise ValueError(
            f"{of}: root={root!r} is not a rank of a world of {world_size}; "
            f"choose one from 0 to {world_size - 1}"
        )


def _is_rank(given: Any, world_size: int) -> bool:
    try:
        return np.ndim(given) == 0 and operator.index(given) in range(world_size)
    except TypeError:
        return False


def check_out(
    out: NDArray[Any], shape: tuple[int | None, ...], dtype: np.dtype[Any], of: str
) -> None:
    """Checks that the result fits into ``out``; None in ``shape`` is a length not known yet.

    Raises:
        TypeError: ``out`` is not a numpy array, or has another dtype.
        ValueError: ``out`` has another shape, is read-only or is not C-contiguous; or a running
            work uses its memory.
    """
    _check_plain(out, of)
    if out.dtype != dtype:
        raise TypeError(f"{of}: out is of {out.dtype}, and the result of {dtype}")
    fits = len(out.shape) == len(shape) and all(
        wanted in (None, length) for wanted, length in zip(shape, out.shape, strict=True)
    )
    if not fits:
        lengths = ", ".join("any" if length is None else str(length) for length in shape)
        raise ValueError(f"{of}: out has shape {out.shape}, and the result ({lengths})")
    if not out.flags.writeable:
        raise ValueError(f"{of}: out is read-only; pass a writable array")
    if not out.flags.c_contiguous:
        raise ValueError(f"{of}: out is not C-contiguous; pass a contiguous array")
    _native.check_unused(out)  # before anything is written or sent


def _check_plain(out: object, of: str) -> None:
    if not isinstance(out, np.ndarray) or isinstance(out, np.ma.MaskedArray):
        raise TypeError(f"{of}: out is a {type(out).__name__}; pass a plain numpy array")


def contents(x: Any) -> NDArray[Any]:
    """Returns ``x`` as a numpy array, without a copy if possible.

    Raises:
        TypeError: ``x`` is not an array of numbers.
    """
    check_plain(x)
    try:
        return x if isinstance(x, np.ndarray) else np.asarray(memoryview(x))
    except (TypeError, BufferError, ValueError):  # bfloat16 has no buffer format
        lent = _native.lent(x)
    return _of_numbers(x) if lent is None else _shown(*lent)


def check_plain(x: Any) -> None:
    """Refuses arrays, and lists of arrays, that are more than numbers.

    Raises:
        TypeError: One has a mask, a unit, or other metadata that would be lost.
    """
    if isinstance(x, list | tuple):
        for each in x:
            check_plain(each)
    elif type(x) is not np.ndarray and not isinstance(x, int | float | str):
        _native.check_plain(x)


def _of_numbers(x: Any) -> NDArray[Any]:
    """Converts an object without a buffer, such as a list, to an array.

    Raises:
        TypeError: `x` is not a number, an array or a list of numbers.
    """
    try:
        array: NDArray[Any] = np.asanyarray(x)
    except ValueError as error:
        raise TypeError(f"this {type(x).__name__} is no array ({error}); pass one") from error
    check_plain(array)  # lazy arrays are evaluated only now, and can have a mask
    if array.dtype == object and not isinstance(x, np.generic):
        raise TypeError(f"a {type(x).__name__} is no array; pass one, a number or a list of them")
    return np.asarray(array)


def split(length: int, parts: int) -> list[int]:
    """Returns the lengths of the parts that ``numpy.array_split`` makes."""
    return [length // parts + (part < length % parts) for part in range(parts)]


def travelling(x: Any, min_dims: int = 1) -> NDArray[Any]:
    """Returns `contents` with at least `min_dims` dimensions, checked for sending.

    Raises:
        TypeError: The dtype is not supported.
        ValueError: A running asynchronous collective writes to this memory.
    """
    array = contents(x)
    _native.check_dtype(array.dtype)
    _native.check_readable(array)
    return array if array.ndim >= min_dims else np.atleast_1d(array)


def _sendable(array: NDArray[Any]) -> NDArray[Any]:
    """Returns the array in a layout that the core accepts, copied if necessary."""
    # `np.require` takes several times as long as a small message.
    return array if array.flags.carray else np.require(array, requirements=["C", "W", "A"])


def _result(
    out: NDArray[Any] | None, shape: tuple[int, ...], dtype: np.dtype[Any], of: str
) -> NDArray[Any]:
    """Returns the memory for the result: `out` if given and valid, else new memory."""
    if out is None:
        return np.empty(shape, dtype)
    check_out(out, shape, dtype, of)
    return out


def row_size(array: NDArray[Any]) -> int:
    """Returns the number of elements of a row."""
    return int(np.prod(array.shape[1:], dtype=np.int64))


def empty(
    group: _native.Communicator, shape: int | Sequence[int], dtype: DTypeLike
) -> NDArray[Any]:
    """Returns the array of `Communicator.empty`."""
    of = _dtype(dtype)
    _native.check_dtype(of)
    lengths = _lengths(shape)
    size = math.prod(lengths) * of.itemsize
    block = group.allocate(min(size, sys.maxsize))
    if block is None:
        return _zeros(lengths, of, size)
    interface = {"version": 3, "shape": lengths, "data": (block.address, False)}
    return _shown(block, of.name, interface)


def _zeros(lengths: tuple[int, ...], of: np.dtype[Any], size: int) -> NDArray[Any]:
    """Returns an ordinary array of `size` bytes in place of one in memory that all ranks read.

    Raises:
        ConfigError: There is no memory for it.
    """
    if size <= sys.maxsize:
        with contextlib.suppress(MemoryError):
            return np.zeros(lengths, of)
    raise ConfigError(
        f"this rank has no memory for {size} bytes of an array of Communicator.empty: make smaller "
        "arrays, or give its process more (ulimit -v, or the limit of its container)"
    )


def _dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """Returns numpy's dtype, also for the name "bfloat16", which numpy does not know."""
    if isinstance(dtype, str) and dtype == "bfloat16":
        return _bfloat16("an array")
    return np.dtype(dtype)


def _lengths(shape: int | Sequence[int]) -> tuple[int, ...]:
    """Returns the lengths of all axes.

    Raises:
        TypeError: One is not a whole number.
        ValueError: One is negative.
    """
    several = shape if isinstance(shape, Iterable) else (shape,)
    lengths = tuple(map(operator.index, several))
    if any(length < 0 for length in lengths):
        raise ValueError(f"empty: shape={shape!r} has a negative length")
    return lengths


class _Memory:
    """Borrowed memory in numpy's array interface; keeps its lender alive."""

    def __init__(self, lender: object, interface: dict[str, Any]) -> None:
        self.lender = lender
        self.__array_interface__ = interface


def _shown(lender: object, dtype_name: str, interface: dict[str, Any]) -> NDArray[Any]:
    """Returns borrowed memory as a numpy array; bfloat16 needs the package ml_dtypes."""
    is_known = dtype_name != "bfloat16"
    name = dtype_name if is_known else "uint16"
    dtype = np.dtype(name) if is_known else _bfloat16("the result")
    memory = _Memory(lender, {**interface, "typestr": np.dtype(name).str})
    shown: NDArray[Any] = np.asarray(memory)
    return shown if is_known else shown.view(dtype)


def _bfloat16(what: str) -> np.dtype[Any]:
    """Returns the dtype of ml_dtypes.

    Raises:
        TypeError: That package is missing.
    """
    try:
        import ml_dtypes
    except ImportError:
        raise TypeError(
            f"numpy has no bfloat16 for {what}; pip install ml_dtypes, or use a collective "
            "that works in place"
        ) from None
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype
