"""The collectives of a group, over arrays and objects."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Generic, NoReturn, TypeVar, cast, overload

import numpy as np
from numpy.typing import NDArray

from gradring import _native
from gradring.errors import ConfigError
from gradring.group import arrays, objects
from gradring.group.arrays import ReduceOp, all_reducing, check_root

T = TypeVar("T")
#: The dtype of an array.
D = TypeVar("D", bound=np.generic)

#: Piece size of an object that is sent.
_PIECE_BYTES = 4 << 20


class Collectives:
    """The collectives of a group; the base of `Communicator`."""

    rank: int
    world_size: int
    host: str
    hosts: list[str]
    #: Settings, listening address and credentials of this process.
    _config: _native.Config
    _rendezvous: str
    #: Name and world ranks of a group made by `split`; None for the group of all ranks.
    _part: tuple[str, Sequence[int]] | None
    #: The group in the core.
    _native: _native.Communicator
    _place: arrays.Place

    def all_reduce(self, x: T, op: ReduceOp = "sum", *, name: str = "") -> T:
        """Reduces ``x`` over all ranks, in place.

        Ring all-reduce of P. Patarasuk and X. Yuan (J. Parallel Distrib. Comput. 69, 2009).

        Args:
            x: An array, or a list of arrays of one dtype. A Python or numpy number is accepted
                too; it cannot change in place, so use the returned one.
            op: ``sum``, ``mean``, ``min``, ``max`` or ``product``.
            name: Compared across ranks and used in messages.

        Returns:
            ``x``, which holds the same bits on every rank.

        Raises:
            TypeError: The dtype is not supported.
            ValueError: An array is read-only or not contiguous, shares memory with another of the
                bucket or of a running work, or ``op`` is unknown.
            GradringError: The group failed; see `gradring.errors`.

        Examples:
            >>> gradients = [np.full(3, rank + 1.0, np.float32), np.ones(2, np.float32)]
            >>> comm.all_reduce(gradients, name="gradients")
            [array([3., 3., 3.], dtype=float32), array([2., 2.], dtype=float32)]
            >>> comm.all_reduce(0.25 * rank, op="mean", name="loss")
            0.125
        """
        # The first test is cheap and saves arrays the second, slower one.
        if type(x) is not np.ndarray and isinstance(x, int | float | np.generic):
            number = np.array(x)
            self._native.all_reduce(number, op, name)
            # item() is a Python number, [()] a numpy one: the result has the type of the argument.
            return cast(T, number[()] if isinstance(x, np.generic) else number.item())
        self._native.all_reduce(x, op, name)
        return x

    def all_reduce_async(self, x: T, op: ReduceOp = "sum", *, name: str = "") -> Work[T]:
        """Starts an `all_reduce` and returns at once; asynchronous collectives run in launch order.

        Args:
            x: As in `all_reduce`, but not a number, which cannot change in place.
            op: As in `all_reduce`.
            name: As in `all_reduce`.

        Returns:
            The work. Its ``wait()`` returns ``x``; do not use ``x`` until then.

        Raises:
            TypeError: ``x`` cannot be reduced in place; nothing is sent then.
            ValueError: As in `all_reduce`.
            GradringError: The group had failed before. ``wait()`` raises later failures.

        Examples:
            >>> x = np.full(3, rank + 1.0, np.float32)
            >>> work = comm.all_reduce_async(x)
            >>> loss = 0.5 * rank  # meanwhile, this rank computes
            >>> work.wait()
            array([3., 3., 3.], dtype=float32)
        """
        return Work(self._native.start(all_reducing(op), x, name), x)

    def prepare(self, x: T, op: ReduceOp = "sum", *, name: str | None = None) -> Plan[T]:
        """Prepares an `all_reduce` that is called often: ``x`` is checked once, and not each time.

        Nothing is sent, so a rank can prepare what others do not, and calls of a plan and of
        `all_reduce` match.

        Args:
            x: As in `all_reduce`, but not a number, which cannot change in place. The plan keeps
                it.
            op: As in `all_reduce`; default "sum".
            name: As in `all_reduce`; default None, which is empty.

        Returns:
            The plan.

        Raises:
            TypeError: As in `all_reduce_async`.
            ValueError: As in `all_reduce`.

        Examples:
            >>> x = np.zeros(2, np.float32)
            >>> plan = comm.prepare(x)
            >>> for step in range(2):
            ...     x[:] = rank + step  # the next gradients, in the same memory
            ...     print(plan())
            [1. 1.]
            [3. 3.]
        """
        return Plan(self, x, op, "" if name is None else name)

    @overload
    def reduce(
        self,
        x: NDArray[D],
        op: ReduceOp = "sum",
        root: int = 0,
        *,
        out: NDArray[D] | None = None,
        name: str = "",
    ) -> NDArray[D] | None: ...
    @overload
    def reduce(
        self,
        x: Any,
        op: ReduceOp = "sum",
        root: int = 0,
        *,
        out: NDArray[Any] | None = None,
        name: str = "",
    ) -> NDArray[Any] | None: ...
    def reduce(
        self,
        x: Any,
        op: ReduceOp = "sum",
        root: int = 0,
        *,
        out: NDArray[Any] | None = None,
        name: str = "",
    ) -> NDArray[Any] | None:
        """Reduces ``x`` over all ranks, for rank ``root``.

        Args:
            x: An array of the same shape and dtype on every rank; it is not changed. A number
                counts as an array without dimensions. Dtypes are those of `all_reduce`.
            op: As in `all_reduce`; default "sum".
            root: The rank that gets the result; default 0.
            out: Memory for the result: a C-contiguous numpy array like ``x``, or ``x`` itself. On
                ranks other than ``root`` its contents are overwritten. Default: new memory.
            name: Compared across ranks and used in messages; default empty.

        Returns:
            The bits that `all_reduce` gives on ``root``; None on all other ranks.

        Raises:
            TypeError: As in `all_reduce`; or ``out`` is not a numpy array of this dtype.
            ValueError: ``root`` is not a rank; ``out`` has another shape or is read-only; or as in
                `all_reduce`.
            GradringError: As in `all_reduce`.

        Examples:
            >>> comm.reduce(np.array([1, 2]) + 10 * rank)  # None on rank 1
            array([12, 14])
        """
        return self._run(arrays.reduce(x, op, root, out, self._place), name)

    @overload
    def reduce_async(
        self,
        x: NDArray[D],
        op: ReduceOp = "sum",
        root: int = 0,
        *,
        out: NDArray[D] | None = None,
        name: str = "",
    ) -> Work[NDArray[D] | None]: ...
    @overload
    def reduce_async(
        self,
        x: Any,
        op: ReduceOp = "sum",
        root: int = 0,
        *,
        out: NDArray[Any] | None = None,
        name: str = "",
    ) -> Work[NDArray[Any] | None]: ...
    def reduce_async(
        self,
        x: Any,
        op: ReduceOp = "sum",
        root: int = 0,
        *,
        out: NDArray[Any] | None = None,
        name: str = "",
    ) -> Work[NDArray[Any] | None]:
        """Starts a `reduce` and returns at once; the work's ``wait()`` returns the result.

        Args:
            x: As in `reduce`.
            op: As in `reduce`.
            root: As in `reduce`.
            out: As in `reduce`.
            name: As in `reduce`.

        Raises:
            TypeError: As in `reduce`.
            ValueError: As in `reduce`.
            GradringError: The group had failed before. ``wait()`` raises later failures.

        Examples:
            >>> work = comm.reduce_async(np.array([1, 2]) + 10 * rank, op="max")
            >>> work.wait()  # None on rank 1
            array([11, 12])
        """
        return self._start(arrays.reduce(x, op, root, out, self._place), name)

    @overload
    def reduce_scatter(
        self, x: NDArray[D], op: ReduceOp = "sum", *, out: NDArray[D] | None = None, name: str = ""
    ) -> NDArray[D]: ...
    @overload
    def reduce_scatter(
        self, x: Any, op: ReduceOp = "sum", *, out: NDArray[Any] | None = None, name: str = ""
    ) -> NDArray[Any]: ...
    def reduce_scatter(
        self, x: Any, op: ReduceOp = "sum", *, out: NDArray[Any] | None = None, name: str = ""
    ) -> NDArray[Any]:
        """Reduces ``x`` over all ranks and gives each rank its part.

        Args:
            x: An array of at least one dimension, of the same shape and dtype on every rank; it is
                not changed. Dtypes are those of `all_reduce`.
            op: As in `all_reduce`; default "sum".
            out: Memory for the result, a C-contiguous numpy array of its shape and dtype; default:
                new memory.
            name: Compared across ranks and used in messages; default empty.

        Returns:
            Part ``rank`` of ``numpy.array_split(reduced, world_size)``: the first axis is divided,
            and the first parts are one longer if it does not divide evenly.

        Raises:
            TypeError: As in `reduce`.
            ValueError: As in `reduce`.
            GradringError: As in `all_reduce`.

        Examples:
            >>> x = np.arange(3) + 10 * rank  # the sum is [10, 12, 14]
            >>> comm.reduce_scatter(x)  # on rank 1: array([14])
            array([10, 12])
        """
        return self._run(arrays.reduce_scatter(x, op, out, self._place), name)

    @overload
    def reduce_scatter_async(
        self, x: NDArray[D], op: ReduceOp = "sum", *, out: NDArray[D] | None = None, name: str = ""
    ) -> Work[NDArray[D]]: ...
    @overload
    def reduce_scatter_async(
        self, x: Any, op: ReduceOp = "sum", *, out: NDArray[Any] | None = None, name: str = ""
    ) -> Work[NDArray[Any]]: ...
    def reduce_scatter_async(
        self, x: Any, op: ReduceOp = "sum", *, out: NDArray[Any] | None = None, name: str = ""
    ) -> Work[NDArray[Any]]:
        """Starts a `reduce_scatter` and returns at once; ``wait()`` returns the result.

        Args:
            x: As in `reduce_scatter`.
            op: As in `reduce_scatter`.
            out: As in `reduce_scatter`.
            name: As in `reduce_scatter`.

        Raises:
            TypeError: As in `reduce_scatter`.
            ValueError: As in `reduce_scatter`.
            GradringError: The group had failed before. ``wait()`` raises later failures.

        Examples:
            >>> work = comm.reduce_scatter_async(np.arange(4.0) + rank, op="mean")
            >>> work.wait()  # on rank 1: array([2.5, 3.5])
            array([0.5, 1.5])
        """
        return self._start(arrays.reduce_scatter(x, op, out, self._place), name)

    @overload
    def all_gather(
        self, x: NDArray[D], *, out: NDArray[D] | None = None, name: str = ""
    ) -> NDArray[D]: ...
    @overload
    def all_gather(
        self, x: Any, *, out: NDArray[Any] | None = None, name: str = ""
    ) -> NDArray[Any]: ...
    def all_gather(
        self, x: Any, *, out: NDArray[Any] | None = None, name: str = ""
    ) -> NDArray[Any]:
        """Joins the arrays of all ranks along the first axis.

        Args:
            x: An array. Ranks can differ in the length of the first axis, but not in other lengths
                or in the dtype. A number counts as an array of one element.
            out: Memory for the result, a C-contiguous numpy array of its shape and dtype; default:
                new memory.
            name: Compared across ranks and used in messages.

        Returns:
            ``numpy.concatenate`` of the arrays in rank order.

        Raises:
            TypeError: The dtype of ``x`` is not supported, or ``out`` is not a numpy array of it;
                nothing is sent then.
            ValueError: ``out`` is read-only or has another shape. If only its number of rows is
                wrong, the collective has taken place, and the other ranks continue.
            GradringError: As in `all_reduce`.

        Examples:
            >>> comm.all_gather(np.full((rank + 1, 2), rank))
            array([[0, 0],
                   [1, 1],
                   [1, 1]])
        """
        array = arrays.travelling(x)  # checked before the lengths are sent
        rest = array.shape[1:]
        if out is not None:
            arrays.check_out(out, (None, *rest), array.dtype, "all_gather")
        counted = np.zeros(self.world_size, np.int64)
        counted[self.rank] = array.shape[0]
        of_lengths = f"{name}/lengths" if name else "lengths"
        one_each = _native.Collective.all_gather([1] * self.world_size)
        self._native.run(one_each, counted, of_lengths)
        lengths: list[int] = counted.tolist()
        shape = (sum(lengths), *rest)
        fits = out is None or out.shape == shape
        try:
            call = arrays.all_gather(array, lengths, out if fits else None, self._place)
        except (MemoryError, ValueError):  # numpy raises either
            # The other ranks wait for this one by now.
            of_ranks = f"all_gather {name!r}"
            self._native.fail_without_memory(math.prod(shape) * array.itemsize, of_ranks)
        gathered = self._run(call, name)
        if out is not None:
            arrays.check_out(out, shape, array.dtype, "all_gather")
        return gathered

    @overload
    def all_gather_async(
        self, x: NDArray[D], *, out: NDArray[D] | None = None, name: str = ""
    ) -> Work[NDArray[D]]: ...
    @overload
    def all_gather_async(
        self, x: Any, *, out: NDArray[Any] | None = None, name: str = ""
    ) -> Work[NDArray[Any]]: ...
    def all_gather_async(
        self, x: Any, *, out: NDArray[Any] | None = None, name: str = ""
    ) -> Work[NDArray[Any]]:
        """Starts an `all_gather` of arrays of equal shapes and returns at once.

        Args:
            x: An array of the same shape and dtype on every rank. Different lengths would have to
                be exchanged before this call could return.
            out: As in `all_gather`.
            name: As in `all_gather`.

        Returns:
            The work. Its ``wait()`` returns the joined array; do not use ``out`` until then.

        Raises:
            TypeError: As in `all_gather`.
            ValueError: ``out`` is read-only or has another shape.
            GradringError: The group had failed before. ``wait()`` raises later failures.

        Examples:
            >>> gathered = np.empty(4)
            >>> work = comm.all_gather_async(np.array([rank, rank + 0.5]), out=gathered)
            >>> work.wait() is gathered
            True
            >>> gathered
            array([0. , 0.5, 1. , 1.5])
        """
        return self._start(arrays.all_gather_of_equals(x, out, self._place), name)

    @overload
    def gather(
        self, x: NDArray[D], root: int = 0, *, out: NDArray[D] | None = None, name: str = ""
    ) -> NDArray[D] | None: ...
    @overload
    def gather(
        self, x: Any, root: int = 0, *, out: NDArray[Any] | None = None, name: str = ""
    ) -> NDArray[Any] | None: ...
    def gather(
        self, x: Any, root: int = 0, *, out: NDArray[Any] | None = None, name: str = ""
    ) -> NDArray[Any] | None:
        """Joins the arrays of all ranks along the first axis, for rank ``root``.

        Args:
            x: An array of the same shape and dtype on every rank. A number counts as an array of
                one element.
            root: The rank that gets the result; default 0.
            out: Memory for the result, a C-contiguous numpy array of its shape and dtype; counts on
                ``root`` only. Default: new memory.
            name: Compared across ranks and used in messages; default empty.

        Returns:
            On ``root``, ``numpy.concatenate`` of the arrays in rank order; None on all other ranks.

        Raises:
            TypeError: As in `reduce`.
            ValueError: As in `reduce`.
            ConfigError: With ``transport="shm"``, there are more than 64 ranks.
            GradringError: As in `all_reduce`.

        Examples:
            >>> comm.gather(np.array([[rank, 7]]))  # None on rank 1
            array([[0, 7],
                   [1, 7]])
        """
        return self._run(arrays.gather(x, root, out, self._place), name)

    @overload
    def gather_async(
        self, x: NDArray[D], root: int = 0, *, out: NDArray[D] | None = None, name: str = ""
    ) -> Work[NDArray[D] | None]: ...
    @overload
    def gather_async(
        self, x: Any, root: int = 0, *, out: NDArray[Any] | None = None, name: str = ""
    ) -> Work[NDArray[Any] | None]: ...
    def gather_async(
        self, x: Any, root: int = 0, *, out: NDArray[Any] | None = None, name: str = ""
    ) -> Work[NDArray[Any] | None]:
        """Starts a `gather` and returns at once; do not change ``x`` until ``wait()`` returns.

        Args:
            x: As in `gather`.
            root: As in `gather`.
            out: As in `gather`.
            name: As in `gather`.

        Raises:
            TypeError: As in `gather`.
            ValueError: As in `gather`.
            ConfigError: As in `gather`.
            GradringError: The group had failed before. ``wait()`` raises later failures.

        Examples:
            >>> work = comm.gather_async(np.array([rank + 0.5]))
            >>> work.wait()  # None on rank 1
            array([0.5, 1.5])
        """
        return self._start(arrays.gather(x, root, out, self._place), name)

    @overload
    def scatter(
        self, x: NDArray[D], root: int = 0, *, out: NDArray[D] | None = None, name: str = ""
    ) -> NDArray[D]: ...
    @overload
    def scatter(
        self, x: Any, root: int = 0, *, out: NDArray[Any] | None = None, name: str = ""
    ) -> NDArray[Any]: ...
    def scatter(
        self, x: Any, root: int = 0, *, out: NDArray[Any] | None = None, name: str = ""
    ) -> NDArray[Any]:
        """Gives every rank its part of rank ``root``'s ``x``.

        Args:
            x: An array of the same shape and dtype on every rank. Only ``root``'s contents are
                sent; other ranks can pass None if they pass ``out``. The first axis is divided
                among the ranks: part ``r`` of ``numpy.split(x, world_size)`` is for rank ``r``.
            root: The rank whose array is divided; default 0.
            out: Memory for the result, a C-contiguous numpy array of its shape and dtype; default:
                new memory.
            name: Compared across ranks and used in messages; default empty.

        Returns:
            This rank's part, on ``root`` too.

        Raises:
            TypeError: As in `reduce`.
            ValueError: The first axis does not divide evenly; or as in `reduce`.
            ConfigError: With ``transport="shm"``, there are more than 64 ranks.
            GradringError: As in `all_reduce`.

        Examples:
            >>> x = np.arange(4.0) if rank == 0 else np.empty(4)
            >>> comm.scatter(x)  # on rank 1: array([2., 3.])
            array([0., 1.])
        """
        return self._run(arrays.scatter(x, root, out, self._place), name)

    @overload
    def scatter_async(
        self, x: NDArray[D], root: int = 0, *, out: NDArray[D] | None = None, name: str = ""
    ) -> Work[NDArray[D]]: ...
    @overload
    def scatter_async(
        self, x: Any, root: int = 0, *, out: NDArray[Any] | None = None, name: str = ""
    ) -> Work[NDArray[Any]]: ...
    def scatter_async(
        self, x: Any, root: int = 0, *, out: NDArray[Any] | None = None, name: str = ""
    ) -> Work[NDArray[Any]]:
        """Starts a `scatter` and returns at once; do not change ``x`` until ``wait()`` returns.

        Args:
            x: As in `scatter`.
            root: As in `scatter`.
            out: As in `scatter`.
            name: As in `scatter`.

        Raises:
            TypeError: As in `scatter`.
            ValueError: As in `scatter`.
            ConfigError: As in `scatter`.
            GradringError: The group had failed before. ``wait()`` raises later failures.

        Examples:
            >>> part = np.empty(2)
            >>> work = comm.scatter_async(np.arange(4.0) if rank == 0 else None, out=part)
            >>> work.wait()  # on rank 1: array([2., 3.])
            array([0., 1.])
        """
        return self._start(arrays.scatter(x, root, out, self._place), name)

    @overload
    def all_to_all(
        self, x: NDArray[D], splits: None = None, *, out: NDArray[D] | None = None, name: str = ""
    ) -> NDArray[D]: ...
    @overload
    def all_to_all(
        self, x: Any, splits: None = None, *, out: NDArray[Any] | None = None, name: str = ""
    ) -> NDArray[Any]: ...
    @overload
    def all_to_all(
        self, x: NDArray[D], splits: Any, *, out: None = None, name: str = ""
    ) -> tuple[NDArray[D], NDArray[np.int64]]: ...
    @overload
    def all_to_all(
        self, x: Any, splits: Any, *, out: None = None, name: str = ""
    ) -> tuple[NDArray[Any], NDArray[np.int64]]: ...
    def all_to_all(
        self, x: Any, splits: Any = None, *, out: NDArray[Any] | None = None, name: str = ""
    ) -> Any:
        """Sends each rank its part of ``x``, and returns the parts that this rank receives.

        If ``splits`` are given (MPI's ``Alltoallv``), each rank first sends each other rank the
        number of its rows, 8 bytes, and then only these rows.

        Args:
            x: An array of the same shape and dtype on every rank; it is not changed. Its first axis
                is divided among the ranks: part ``r`` of ``numpy.split(x, world_size)`` is for rank
                ``r``. Dtypes are those of `all_reduce`. Ranks that pass ``splits`` can differ in
                the length of the first axis.
            splits: Number of rows for each rank, in rank order: ``world_size`` integers of at least
                0. Their sum is the length of the first axis. Either all ranks pass splits, or none.
                Default: equal parts.
            out: Memory for the result, a C-contiguous numpy array like ``x``, which shares no
                memory with it; cannot be combined with ``splits``. Default: new memory.
            name: Compared across ranks and used in messages; default empty.

        Returns:
            An array like ``x``, whose part ``r`` came from rank ``r``. If ``splits`` are given: the
            rows from all ranks in rank order, and the number of rows from each rank, an int64 array
            of ``world_size`` elements.

        Raises:
            TypeError: The dtype of ``x`` is not supported, ``out`` is not a numpy array of it, or
                ``splits`` are not integers; nothing is sent then.
            ValueError: The first axis does not divide evenly, or its length is not the sum of
                ``splits``; or as in `reduce`. Nothing is sent then.
            ConfigError: With ``transport="shm"``, there are more than 64 ranks; or a rank has too
                little memory for the rows that it receives.
            GradringError: As in `all_reduce`.

        Examples:
            >>> x = np.arange(4) + 10 * rank  # the first two for rank 0, the others for rank 1
            >>> comm.all_to_all(x)  # on rank 1: array([ 2,  3, 12, 13])
            array([ 0,  1, 10, 11])
            >>> comm.all_to_all(x, splits=[1, 3])  # rank 1 gets three rows from each
            (array([ 0, 10]), array([1, 1]))
        """
        if splits is None:
            return self._run(arrays.all_to_all(x, out, self._place), name)
        return self._run(self._call_with_splits(x, splits, out, name), name)

    @overload
    def all_to_all_async(
        self, x: NDArray[D], splits: None = None, *, out: NDArray[D] | None = None, name: str = ""
    ) -> Work[NDArray[D]]: ...
    @overload
    def all_to_all_async(
        self, x: Any, splits: None = None, *, out: NDArray[Any] | None = None, name: str = ""
    ) -> Work[NDArray[Any]]: ...
    @overload
    def all_to_all_async(
        self, x: NDArray[D], splits: Any, *, out: None = None, name: str = ""
    ) -> Work[tuple[NDArray[D], NDArray[np.int64]]]: ...
    @overload
    def all_to_all_async(
        self, x: Any, splits: Any, *, out: None = None, name: str = ""
    ) -> Work[tuple[NDArray[Any], NDArray[np.int64]]]: ...
    def all_to_all_async(
        self, x: Any, splits: Any = None, *, out: NDArray[Any] | None = None, name: str = ""
    ) -> Work[Any]:
        """Starts an `all_to_all` and returns at once; do not change ``x`` until ``wait()`` returns.

        If ``splits`` are given, the call first waits for the splits of all ranks, and only the rows
        are sent in the background.

        Args:
            x: As in `all_to_all`.
            splits: As in `all_to_all`.
            out: As in `all_to_all`.
            name: As in `all_to_all`.

        Raises:
            TypeError: As in `all_to_all`.
            ValueError: As in `all_to_all`.
            ConfigError: As in `all_to_all`.
            GradringError: The group had failed before. ``wait()`` raises later failures.

        Examples:
            >>> work = comm.all_to_all_async(np.array([0.0, 1.0]) + 10 * rank)
            >>> work.wait()  # on rank 1: array([ 1., 11.])
            array([ 0., 10.])
        """
        if splits is None:
            return self._start(arrays.all_to_all(x, out, self._place), name)
        return self._start(self._call_with_splits(x, splits, out, name), name)

    def _call_with_splits(
        self, x: Any, splits: Any, out: NDArray[Any] | None, name: str
    ) -> arrays.Call[tuple[NDArray[Any], NDArray[np.int64]]]:
        """Exchanges the splits of all ranks and returns the call that sends the rows."""
        array, sent = arrays.parted(x, splits, out, self._place)
        exchange = arrays.all_to_all(np.array(sent, np.int64), None, self._place)
        rows = self._run(exchange, f"{name}/splits" if name else "splits").tolist()
        of, size = f"all_to_all {name!r}" if name else "all_to_all", array.itemsize
        received = self._native.elements_of_rows(rows, arrays.row_size(array), size, of)
        try:
            result = np.empty((sum(rows), *array.shape[1:]), array.dtype)
        except (MemoryError, ValueError):  # numpy raises either
            # The other ranks wait for this one by now.
            self._native.fail_without_memory(sum(received) * size, of)
        return arrays.all_to_all_v(array, sent, result, rows, received, self._place)

    def broadcast(self, x: T, root: int = 0, *, name: str = "") -> T:
        """Copies the contents of ``x`` on rank ``root`` to ``x`` on all ranks, in place.

        Args:
            x: An array, or a list of arrays of one dtype, of the same shapes on every rank.
            root: The rank whose contents are copied; default 0.
            name: Compared across ranks and used in messages; default empty.

        Returns:
            ``x``.

        Raises:
            TypeError: As in `all_reduce`.
            ValueError: ``root`` is not a rank; or as in `all_reduce`.
            GradringError: As in `all_reduce`.

        Examples:
            >>> weights = np.full(3, rank, np.float32)
            >>> comm.broadcast(weights, root=1)
            array([1., 1., 1.], dtype=float32)
        """
        return self._run(arrays.broadcast(x, root, self._place), name)

    def broadcast_async(self, x: T, root: int = 0, *, name: str = "") -> Work[T]:
        """Starts a `broadcast` and returns at once; do not use ``x`` until ``wait()`` returns.

        Args:
            x: As in `broadcast`.
            root: As in `broadcast`.
            name: As in `broadcast`.

        Raises:
            TypeError: As in `broadcast`.
            ValueError: As in `broadcast`.
            GradringError: The group had failed before. ``wait()`` raises later failures.

        Examples:
            >>> weights = np.arange(3) if rank == 0 else np.empty(3, np.int64)
            >>> work = comm.broadcast_async(weights)
            >>> work.wait()  # the same on rank 1
            array([0, 1, 2])
        """
        return self._start(arrays.broadcast(x, root, self._place), name)

    def send(self, x: Any, dest: int, *, name: str = "") -> None:
        """Sends ``x`` to rank ``dest``, which must call `recv`; other ranks are not involved.

        Returns once the other rank is in its `recv` and all bytes are handed over. So two ranks
        that both call `send` first deadlock, as do ranks in a circle; use `send_async` for these
        patterns. Messages from one rank to another arrive in the order in which they were sent.
        Messages of other pairs, of the other direction, and collectives have no order relative to
        them. The first message between two ranks opens their connection.

        Args:
            x: An array, or a list of arrays of one dtype, which are not changed; or a number, which
                counts as an array without dimensions. Dtypes are those of `all_reduce`.
            dest: The rank that receives.
            name: Compared with the name of the `recv` and used in messages; default empty.

        Raises:
            TypeError: As in `all_reduce`.
            ValueError: ``dest`` is not another rank; or as in `all_reduce`.
            MismatchError: The `recv` has another dtype, shape or name; the group fails.
            CollectiveTimeoutError: The other rank is alive, but calls no `recv` within
                ``stall_timeout``.
            GradringError: The group failed; see `gradring.errors`.

        Examples:
            >>> if rank == 1:
            ...     comm.send(np.arange(3.0), dest=0, name="activations")
            ... else:
            ...     comm.recv(np.empty(3), source=1, name="activations")
            array([0., 1., 2.])
        """
        self._run(arrays.send(x, dest, self._place), name)

    def send_async(self, x: Any, dest: int, *, name: str = "") -> Work[None]:
        """Starts a `send` and returns at once; do not change ``x`` until ``wait()`` returns.

        Args:
            x: As in `send`.
            dest: As in `send`.
            name: As in `send`.

        Raises:
            TypeError: As in `send`.
            ValueError: As in `send`.
            GradringError: The group had failed before. ``wait()`` raises later failures.

        Examples:
            >>> other = 1 - rank
            >>> work = comm.send_async(np.array([rank + 0.5]), dest=other)
            >>> comm.recv(np.empty(1), source=other)  # both have sent: send() would wait for ever
            array([1.5])
            >>> work.wait()
        """
        return self._start(arrays.send(x, dest, self._place), name)

    def recv(self, x: T, source: int, *, name: str = "") -> T:
        """Receives a message of rank ``source`` into ``x``.

        Args:
            x: An array, or a list of arrays of one dtype, with the dtype and shapes that `send`
                has.
            source: The rank that sends.
            name: Compared with the name of the `send` and used in messages; default empty.

        Returns:
            ``x``.

        Raises:
            ValueError: ``source`` is not another rank; or as in `all_reduce`.
            GradringError: As in `send`.

        Examples:
            >>> if rank == 0:
            ...     comm.recv([np.empty(2), np.empty(1)], source=1)
            ... else:
            ...     comm.send([np.array([1.0, 2.0]), np.array([0.5])], dest=0)
            [array([1., 2.]), array([0.5])]
        """
        return self._run(arrays.receive(x, source, self._place), name)

    def recv_async(self, x: T, source: int, *, name: str = "") -> Work[T]:
        """Starts a `recv` and returns at once; do not use ``x`` until ``wait()`` returns it.

        Args:
            x: As in `recv`.
            source: As in `recv`.
            name: As in `recv`.

        Raises:
            ValueError: As in `recv`.
            GradringError: The group had failed before. ``wait()`` raises later failures.

        Examples:
            >>> work = comm.recv_async(np.empty(2), source=1 - rank)
            >>> comm.send(np.full(2, rank + 0.5), dest=1 - rank)
            >>> work.wait()
            array([1.5, 1.5])
        """
        return self._start(arrays.receive(x, source, self._place), name)

    def barrier(self) -> None:
        """Returns when every rank has called it.

        Raises:
            GradringError: The group failed; see `gradring.errors`.

        Examples:
            >>> if rank == 1:
            ...     np.save("table.npy", np.arange(3))
            >>> comm.barrier()  # from here on, the file is there
            >>> np.load("table.npy")
            array([0, 1, 2])
        """
        self._native.barrier()

    def barrier_async(self) -> Work[None]:
        """Starts a `barrier` and returns at once; ``wait()`` returns when every rank has called it.

        Examples:
            >>> work = comm.barrier_async()
            >>> batch = np.ones(4)  # meanwhile, this rank computes
            >>> work.wait()
        """
        return Work(self._native.start_barrier(), None)

    def _check_trusted(self, of: str) -> None:
        """Refuses pickles if processes outside of the job could join the group.

        Raises:
            ConfigError: They could: there is no token and no TLS, and other hosts can reach a port.
        """
        if self.world_size == 1 or self._config.keeps_strangers_out:
            return
        # A foreign rank can lie about its host. But if one has joined, some rank of the job is
        # reachable from other hosts, and that rank reports it.
        reachable = self._native.reachable_from_other_hosts
        others = [rank for rank, host in enumerate(self.hosts) if host != self.hosts[0]]
        open_ranks = reachable or others
        if open_ranks:
            raise ConfigError(
                f"{of}: a pickle can run code where it is opened. The job has no token and no "
                f"TLS, so anybody who reaches the port of rank {open_ranks[0]} on "
                f"{self.hosts[open_ranks[0]]} could join it; set GRADRING_TOKEN or "
                "GRADRING_TOKEN_FILE on all ranks, or send values of JSON, without pickle=True",
                rank=self.rank,
                host=self.host,
            )

    def _run(self, call: arrays.Call[T], name: str) -> T:
        self._native.run(call.collective, call.arrays, name, call.shape)
        return call.result

    def _start(self, call: arrays.Call[T], name: str) -> Work[T]:
        work = self._native.start(call.collective, call.arrays, name, call.shape)
        return Work(work, call.result)

    def broadcast_object(
        self, value: Any, root: int = 0, *, pickle: bool = False, name: str = ""
    ) -> Any:
        """Gives every rank the object of rank ``root``.

        Args:
            value: On ``root``, an object that JSON reproduces exactly: None, a bool, a number,
                text, or a list or a dict of these, whose keys are text. Tuples, bytes, arrays and
                subclasses are refused; NaN and infinities are allowed. Ignored on other ranks.
            root: The rank whose object is sent; default 0.
            pickle: True, on every rank, for any object that can be pickled. Unpickling runs code
                chosen by the sender: anybody able to join the group or to change its traffic can
                run code on all ranks. So the group needs a token or TLS, unless all ranks listen on
                the loopback interface of one host. Use TLS on networks shared with others.
            name: Compared across ranks and used in messages; default "object".

        Returns:
            The object; on ``root`` it is ``value`` itself.

        Raises:
            TypeError: JSON has no form for the object or would silently change it; nothing is sent
                then. Or this rank cannot unpickle it.
            ValueError: ``root`` is not a rank.
            ConfigError: ``pickle`` without a token or TLS, in a group that foreign processes could
                join; nothing is sent then.
            GradringError: As in `all_reduce`; a `MismatchError` also if ranks differ in ``pickle``.

        Examples:
            >>> comm.broadcast_object({"run": "digits", "seed": 7} if rank == 0 else None)
            {'run': 'digits', 'seed': 7}
            >>> comm.broadcast_object({2, 3, 5} if rank == 0 else None, pickle=True)
            {2, 3, 5}
        """
        check_root(root, self.world_size, "broadcast_object")
        if pickle:
            self._check_trusted("broadcast_object")
        is_root = self.rank == root
        own = objects.encode(value, pickle, "broadcast_object") if is_root else ""
        received = broadcast_bytes(self, own, root, _name_of_object(name, pickle))
        return value if is_root else objects.decode(received, pickle, root, "broadcast_object")

    def all_gather_object(self, value: Any, *, pickle: bool = False, name: str = "") -> list[Any]:
        """Gives every rank the objects of all ranks.

        Args:
            value: As in `broadcast_object`; objects of different ranks can have different types.
            pickle: As in `broadcast_object`.
            name: As in `broadcast_object`.

        Returns:
            The objects, in rank order; at this rank's place it is ``value`` itself.

        Raises:
            TypeError: As in `broadcast_object`.
            ConfigError: As in `broadcast_object`.
            GradringError: As in `broadcast_object`.

        Examples:
            >>> comm.all_gather_object({"rank": rank, "files": ["a.npy", "b.npy"][: rank + 1]})
            [{'rank': 0, 'files': ['a.npy']}, {'rank': 1, 'files': ['a.npy', 'b.npy']}]
        """
        if pickle:
            self._check_trusted("all_gather_object")
        own = objects.encode(value, pickle, "all_gather_object")
        own = _in_bytes(own) if isinstance(own, str) else own
        gathered = all_gather_bytes(self, own, _name_of_object(name, pickle))
        own.clear()
        of = "all_gather_object"
        return [
            value if rank == self.rank else objects.decode(received, pickle, rank, of)
            for rank, received in enumerate(gathered)
        ]


class Work(Generic[T]):
    """A handle of an asynchronous collective, returned by methods that end in ``_async``.

    Examples:
        >>> work = comm.all_reduce_async(np.full(2, rank + 1.0))
        >>> work.wait()
        array([3., 3.])
        >>> work.done()
        True
    """

    def __reduce__(self) -> NoReturn:
        """A work cannot be pickled or copied."""
        raise TypeError("a work cannot be pickled or copied; wait for it in its own process")

    def __init__(self, native: _native.Work, x: T) -> None:
        self._native = native
        self._x = x

    def done(self) -> bool:
        """Returns True once the collective has ended, with a result or an error.

        Examples:
            >>> work = comm.recv_async(np.empty(1), source=1 - rank)
            >>> work.done()  # the other rank has not sent
            False
            >>> comm.barrier()
            >>> comm.send(np.array([rank + 0.5]), dest=1 - rank)
            >>> work.wait()
            array([1.5])
            >>> work.done()
            True
        """
        return self._native.done()

    def wait(self, timeout: float | None = None) -> T:
        """Waits for the end of the collective.

        Args:
            timeout: Seconds to wait; None or infinity: up to the communicator's ``stall_timeout``.

        Returns:
            The result of the collective.

        Raises:
            CollectiveTimeoutError: ``timeout`` has passed; the collective continues, and ``rank``
                is None, because no rank is to blame.
            ValueError: ``timeout`` is negative or not a number.
            GradringError: The group failed; see `gradring.errors`.

        Examples:
            >>> if rank == 0:
            ...     work = comm.recv_async(np.empty(1), source=1)
            ...     work.wait(timeout=0.1)  # rank 1 has not sent yet
            Traceback (most recent call last):
                ...
            gradring.errors.CollectiveTimeoutError: recv(source=1) float64[1] (collective #1): has
            not ended within the 0.1 s of this wait ...; it goes on: wait again, ...
            >>> comm.barrier()
            >>> if rank == 1:
            ...     comm.send(np.ones(1), dest=0)
            ... else:
            ...     work.wait()  # what it waits for has gone on
            array([1.])
        """
        self._native.wait(timeout)
        return self._x


class Plan(_native.Plan[T], Generic[T]):
    """A prepared `all_reduce`, made by `Communicator.prepare`.

    ``plan()`` reduces the arrays in place and returns them, like `Communicator.all_reduce`, whose
    errors it raises. Also raises ``ValueError`` if an array has changed its memory, shape, dtype or
    flags since `prepare`, or has been replaced in its list. The plan keeps its communicator open.

    Examples:
        >>> gradients = [np.full(3, rank + 1.0, np.float32), np.ones(2, np.float32)]
        >>> plan = comm.prepare(gradients, op="mean", name="gradients")
        >>> plan()
        [array([1.5, 1.5, 1.5], dtype=float32), array([1., 1.], dtype=float32)]
    """

    def __reduce__(self) -> NoReturn:
        """A plan cannot be pickled or copied."""
        raise TypeError("a plan cannot be pickled or copied; prepare one in each process")

    def start(self) -> Work[T]:
        """Starts the `all_reduce` and returns at once, like `Communicator.all_reduce_async`.

        Returns:
            The work. Its ``wait()`` returns the arrays; do not use them until then.

        Raises:
            TypeError: As in `all_reduce_async`.
            ValueError: As for a call.
            GradringError: The group had failed before. ``wait()`` raises later failures.

        Examples:
            >>> x = np.full(3, rank + 1.0, np.float32)
            >>> plan = comm.prepare(x)
            >>> work = plan.start()
            >>> loss = 0.5 * rank  # meanwhile, this rank computes
            >>> work.wait()
            array([3., 3., 3.], dtype=float32)
        """
        return Work(self._begin(), self.arrays)


def named(communicator: Collectives, rank: int) -> str:
    """Returns the name of a rank in messages, with its host."""
    text = f"rank {rank} on {communicator.hosts[rank]}"
    if communicator._part is None:
        return text
    name, of_world = communicator._part
    return f"{text} (in {name}; rank {of_world[rank]} of the world)"


def all_gather_bytes(
    communicator: Collectives, own: bytes | bytearray, name: str
) -> list[bytearray]:
    """Returns the bytes of every rank, by rank; their lengths can differ.

    If `own` is a `bytearray`, it is an element of the result itself, not a copy.
    """
    sizes = communicator.all_gather(np.array([len(own)]), name=f"{name}/sizes").tolist()
    own = own if isinstance(own, bytearray) else bytearray(own)
    parts = [own] * len(sizes)
    try:
        for rank in set(range(len(sizes))) - {communicator.rank}:
            parts[rank] = bytearray(sizes[rank])
    except (MemoryError, OverflowError):
        # The other ranks wait for this one by now.
        communicator._native.fail_without_memory(sum(sizes), f"all_gather {name!r}")
    collective = _native.Collective.all_gather(sizes)
    return communicator._run(arrays.Call(collective, parts, parts, (sum(sizes),)), name)


def broadcast_bytes(
    communicator: Collectives, own: str | bytearray, root: int, name: str
) -> bytearray:
    """Sends bytes or ASCII text of rank `root` to every other rank; returns b"" on `root`.

    The message is sent in pieces, so that a large text never has a second copy as bytes.
    """
    size = np.array([len(own)])
    communicator.broadcast(size, root, name=f"{name}/size")
    total, is_root = int(size[0]), communicator.rank == root
    try:
        received = bytearray(0 if is_root else total)
    except (MemoryError, OverflowError):
        # The other ranks wait for this one by now.
        communicator._native.fail_without_memory(total, f"broadcast {name!r}")
    for start in range(0, total, _PIECE_BYTES):
        communicator.broadcast(_piece(own if is_root else received, start), root, name=name)
    return received


def _piece(of: str | bytearray, start: int) -> bytearray | memoryview:
    """Returns the piece that begins at `start`: a copy of text, a view of bytes."""
    part = slice(start, start + _PIECE_BYTES)
    return bytearray(of[part], "ascii") if isinstance(of, str) else memoryview(of)[part]


def _in_bytes(text: str) -> bytearray:
    """Encodes ASCII text as a `bytearray`, without a second copy in memory."""
    found = bytearray(len(text))
    for start in range(0, len(text), _PIECE_BYTES):
        found[start : start + _PIECE_BYTES] = _piece(text, start)
    return found


def _name_of_object(name: str, pickled: bool) -> str:
    """Returns the collective's name, which differs by format: JSON and pickle must not be mixed."""
    return (name or "object") + ("/pickled" if pickled else "")
