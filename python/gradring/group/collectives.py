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

#: Of an object that travels.
_PIECE_BYTES = 4 << 20


class Collectives:
    """The collectives of a group, for whatever has one."""

    rank: int
    world_size: int
    host: str
    hosts: list[str]
    #: Its settings, where this process listens, and what proves that it belongs to the job.
    _config: _native.Config
    _rendezvous: str
    #: Of a group of `split`: its name, and what its ranks are in the world.
    _part: tuple[str, Sequence[int]] | None
    #: The group as the core has it.
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
                bucket or of a work under way, or ``op`` is unknown.
            GradringError: The group failed; see `gradring.errors`.

        Examples:
            >>> gradients = [np.full(3, rank + 1.0, np.float32), np.ones(2, np.float32)]
            >>> comm.all_reduce(gradients, name="gradients")
            [array([3., 3., 3.], dtype=float32), array([2., 2.], dtype=float32)]
            >>> comm.all_reduce(0.25 * rank, op="mean", name="loss")
            0.125
        """
        # The first test spares arrays the second, which takes longer.
        if type(x) is not np.ndarray and isinstance(x, int | float | np.generic):
            number = np.array(x)
            self._native.all_reduce(number, op, name)
            # item() is a Python number, [()] a numpy one: the program gets the kind it gave.
            return cast(T, number[()] if isinstance(x, np.generic) else number.item())
        self._native.all_reduce(x, op, name)
        return x

    def all_reduce_async(self, x: T, op: ReduceOp = "sum", *, name: str = "") -> Work[T]:
        """As `all_reduce`, but returns at once; asynchronous collectives run in launch order.

        Args:
            x: As in `all_reduce`, but no number: it could not change in place.
            op: As in `all_reduce`.
            name: As in `all_reduce`.

        Returns:
            The work. Its ``wait()`` returns ``x``, which must be left alone until then.

        Raises:
            TypeError: ``x`` cannot be reduced in place; nothing is sent then.
            ValueError: As in `all_reduce`.
            GradringError: The group failed before; what fails later is raised by ``wait()``.

        Examples:
            >>> x = np.full(3, rank + 1.0, np.float32)
            >>> work = comm.all_reduce_async(x)
            >>> loss = 0.5 * rank  # meanwhile, this rank computes
            >>> work.wait()
            array([3., 3., 3.], dtype=float32)
        """
        return Work(self._native.start(all_reducing(op), x, name), x)

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
                counts as an array without dimensions. Any dtype that `all_reduce` takes.
            op: As in `all_reduce`; default "sum".
            root: The rank that gets the result; default 0.
            out: Memory for the result, a C-contiguous numpy array like ``x``, or ``x`` itself; on
                other ranks than ``root``, what it holds is lost. Default: new memory.
            name: Compared across ranks and used in messages; default empty.

        Returns:
            On ``root``, the same bits as `all_reduce` gives; None on all other ranks.

        Raises:
            TypeError: As in `all_reduce`; or ``out`` is no numpy array of this dtype.
            ValueError: ``root`` is not a rank; ``out`` has another shape or cannot be written; or
                as in `all_reduce`.
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
        """As `reduce`, but returns at once: the work's ``wait()`` returns what `reduce` does.

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
                not changed. Any dtype that `all_reduce` takes.
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
        """As `reduce_scatter`, but returns at once: ``wait()`` returns its result.

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
            x: An array; the ranks' arrays may differ in the length of the first axis, in nothing
                else. A number counts as an array of one element.
            out: Memory for the result, a C-contiguous numpy array of its shape and dtype; default:
                new memory.
            name: Compared across ranks and used in messages.

        Returns:
            ``numpy.concatenate`` of the arrays in rank order.

        Raises:
            TypeError: The dtype of ``x`` cannot travel, or ``out`` is no numpy array of it; nothing
                is sent then.
            ValueError: ``out`` cannot be written, or has another shape. If it is the number of rows
                that does not fit, the collective has taken place: the other ranks go on.
            GradringError: As in `all_reduce`.

        Examples:
            >>> comm.all_gather(np.full((rank + 1, 2), rank))
            array([[0, 0],
                   [1, 1],
                   [1, 1]])
        """
        array = arrays.travelling(x)  # which is checked before the lengths travel
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
        except (MemoryError, ValueError):  # too much for numpy, too
            # The others wait for this rank by now.
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
        """As `all_gather` of arrays of one shape, but returns at once.

        Args:
            x: An array of the same shape and dtype on every rank: to learn of other lengths, it
                would have to wait.
            out: As in `all_gather`.
            name: As in `all_gather`.

        Returns:
            The work. Its ``wait()`` returns what `all_gather` does; until then, ``out`` must be
            left alone.

        Raises:
            TypeError: As in `all_gather`.
            ValueError: ``out`` cannot be written, or has another shape.
            GradringError: The group failed before; what fails later is raised by ``wait()``.

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
        """As `gather`, but returns at once; ``x`` must be left alone until ``wait()`` returns.

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
            x: An array of the same shape and dtype on every rank, of which only ``root``'s contents
                travel; elsewhere it may be None if ``out`` is given. Its first axis is divided
                among the ranks: part ``r`` of ``numpy.split(x, world_size)`` is for rank ``r``.
            root: The rank that has the parts; default 0.
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
        """As `scatter`, but returns at once; ``x`` must be left alone until ``wait()`` returns.

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
        """Gives every rank its part of ``x``, and returns the parts that all have for this one.

        With ``splits``, each rank first tells each other how many rows it has for it, 8 bytes; then
        these rows travel, and nothing else (MPI's ``Alltoallv``).

        Args:
            x: An array of the same shape and dtype on every rank; it is not changed. Its first axis
                is divided among the ranks: part ``r`` of ``numpy.split(x, world_size)`` is for rank
                ``r``. Any dtype that `all_reduce` takes. With ``splits``, ranks may differ in the
                length of the first axis.
            splits: How many rows go to each rank, in rank order: ``world_size`` integers of at
                least 0, which add up to the length of the first axis; all ranks have some, or none.
                Default: equally many.
            out: Memory for the result, a C-contiguous numpy array like ``x``, which shares no
                memory with it; not with ``splits``. Default: new memory.
            name: Compared across ranks and used in messages; default empty.

        Returns:
            An array like ``x``: in part ``r``, what rank ``r`` had for this one. With ``splits``,
            the rows from all ranks, in rank order, and how many came from each, as an int64 array
            of ``world_size`` elements.

        Raises:
            TypeError: The dtype of ``x`` cannot travel, or ``out`` is no numpy array of it, or
                ``splits`` are no integers; nothing is sent then.
            ValueError: The first axis does not divide evenly, or as ``splits`` say; or as in
                `reduce`; nothing is sent then.
            ConfigError: With ``transport="shm"``, there are more than 64 ranks; or a rank has no
                memory for what the others have for it.
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
        return self._run(self._told(x, splits, out, name), name)

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
        """As `all_to_all`, but returns at once; ``x`` must be left alone until ``wait()`` ends.

        With ``splits`` it returns once all ranks have told theirs, so every rank has to call it
        before any goes on; the rows travel meanwhile.

        Examples:
            >>> work = comm.all_to_all_async(np.array([0.0, 1.0]) + 10 * rank)
            >>> work.wait()  # on rank 1: array([ 1., 11.])
            array([ 0., 10.])
        """
        if splits is None:
            return self._start(arrays.all_to_all(x, out, self._place), name)
        return self._start(self._told(x, splits, out, name), name)

    def _told(
        self, x: Any, splits: Any, out: NDArray[Any] | None, name: str
    ) -> arrays.Call[tuple[NDArray[Any], NDArray[np.int64]]]:
        """The call of `all_to_all` with splits, which all ranks have told each other then."""
        array, sent = arrays.parted(x, splits, out, self._place)
        telling = arrays.all_to_all(np.array(sent, np.int64), None, self._place)
        rows = self._run(telling, f"{name}/splits" if name else "splits").tolist()
        of, size = f"all_to_all {name!r}" if name else "all_to_all", array.itemsize
        received = self._native.elements_of_rows(rows, arrays.row_size(array), size, of)
        try:
            result = np.empty((sum(rows), *array.shape[1:]), array.dtype)
        except (MemoryError, ValueError):  # too much for numpy, too
            # The others wait for this rank by now.
            self._native.fail_without_memory(sum(received) * size, of)
        return arrays.all_to_all_v(array, sent, result, rows, received, self._place)

    def broadcast(self, x: T, root: int = 0, *, name: str = "") -> T:
        """Copies the contents of ``x`` on rank ``root`` to ``x`` on all ranks, in place.

        Args:
            x: An array, or a list of arrays of one dtype, of the same shapes on every rank.
            root: The rank whose contents win; default 0.
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
        """As `broadcast`, but returns at once; ``x`` must be left alone until ``wait()`` ends.

        Examples:
            >>> weights = np.arange(3) if rank == 0 else np.empty(3, np.int64)
            >>> work = comm.broadcast_async(weights)
            >>> work.wait()  # the same on rank 1
            array([0, 1, 2])
        """
        return self._start(arrays.broadcast(x, root, self._place), name)

    def send(self, x: Any, dest: int, *, name: str = "") -> None:
        """Sends ``x`` to rank ``dest``, which calls `recv`; other ranks need not know of it.

        Ends once the other rank is in its `recv` and all has been handed over, so two ranks that
        both send first wait for each other, as do ranks in a circle; use `send_async` there. What
        goes from one rank to another arrives in the order in which it was sent; it has no order
        with what goes elsewhere or the other way, and none with collectives. The first use between
        two ranks connects them.

        Args:
            x: An array, or a list of arrays of one dtype, which are not changed; or a number, which
                counts as an array without dimensions. Any dtype that `all_reduce` takes.
            dest: The rank that receives.
            name: Compared with that of the `recv`, and used in messages; default empty.

        Raises:
            TypeError: As in `all_reduce`.
            ValueError: ``dest`` is not another rank; or as in `all_reduce`.
            MismatchError: The `recv` has another dtype, shape or name; it ends the group.
            CollectiveTimeoutError: The other rank lives, but calls no `recv` within
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
        """As `send`, but returns at once; ``x`` must be left alone until ``wait()`` ends.

        Examples:
            >>> other = 1 - rank
            >>> work = comm.send_async(np.array([rank + 0.5]), dest=other)
            >>> comm.recv(np.empty(1), source=other)  # both have sent: send() would wait for ever
            array([1.5])
            >>> work.wait()
        """
        return self._start(arrays.send(x, dest, self._place), name)

    def recv(self, x: T, source: int, *, name: str = "") -> T:
        """Receives into ``x`` what rank ``source`` sends.

        Args:
            x: An array, or a list of arrays of one dtype, of the shapes that are sent.
            source: The rank that sends.
            name: Compared with that of the `send`, and used in messages; default empty.

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
        """As `recv`, but returns at once; ``x`` must be left alone until ``wait()`` returns it.

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
        """As `barrier`, but returns at once: ``wait()`` returns when every rank has called it.

        Examples:
            >>> work = comm.barrier_async()
            >>> batch = np.ones(4)  # meanwhile, this rank computes
            >>> work.wait()
        """
        return Work(self._native.start_barrier(), None)

    def _check_trusted(self, of: str) -> None:
        """Refuses pickles where a stranger could be a rank.

        Raises:
            ConfigError: One could.
        """
        if self.world_size == 1 or self._config.keeps_strangers_out:
            return
        # A stranger's rank may tell anything of itself. But where there is one, a rank of the job
        # can be reached, and tells so.
        reachable = self._native.reachable_from_other_hosts
        others = [rank for rank, host in enumerate(self.hosts) if host != self.hosts[0]]
        open_ranks = reachable or others
        if open_ranks:
            raise ConfigError(
                f"{of}: a pickle can run code where it is opened, and anybody who reaches the "
                f"port of rank {open_ranks[0]} on {self.hosts[open_ranks[0]]} could be a rank, "
                "since the job has no token and no TLS; set GRADRING_TOKEN or GRADRING_TOKEN_FILE "
                "on all ranks, or send what JSON can say, without pickle=True",
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
            value: On ``root``, None, a bool, a number, text, or a list, or a dict with text for
                keys, of such: what JSON gives back as it is, so no tuples, bytes or arrays, and no
                subclasses. NaN and infinities travel, too. On other ranks it does not count.
            root: The rank whose object it is; default 0.
            pickle: True, on every rank, for any object that can be pickled. To unpickle is to run
                what the sender likes: who can join the group, or change what travels, can run
                code on all ranks. So a group needs a token or TLS for it, unless all ranks listen
                on the loopback interface of one host; across networks that others use, take TLS.
            name: Compared across ranks and used in messages; default "object".

        Returns:
            The object; on ``root`` it is ``value`` itself.

        Raises:
            TypeError: JSON cannot say it, or would silently change it; nothing is sent then. Or
                this rank cannot unpickle it.
            ValueError: ``root`` is not a rank.
            ConfigError: ``pickle`` without a token and TLS, in a group that others could join;
                nothing is sent then.
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
            value: As in `broadcast_object`; ranks may have quite different ones.
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
    """An asynchronous collective under way, made by the collectives that end in ``_async``.

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
        """Whether the collective has ended, well or badly.

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
            timeout: Seconds to wait; without it, or with infinity, as long as the communicator's
                ``stall_timeout`` allows.

        Returns:
            What the collective itself would return.

        Raises:
            CollectiveTimeoutError: ``timeout`` is over; the collective goes on, and ``rank`` is
                None, because no rank is to blame.
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


def named(communicator: Collectives, rank: int) -> str:
    """A rank as messages call it."""
    text = f"rank {rank} on {communicator.hosts[rank]}"
    if communicator._part is None:
        return text
    name, of_world = communicator._part
    return f"{text} (in {name}; rank {of_world[rank]} of the world)"


def all_gather_bytes(
    communicator: Collectives, own: bytes | bytearray, name: str
) -> list[bytearray]:
    """The bytes of every rank, by rank; they may differ in number.

    A `bytearray` of this rank is among them itself.
    """
    sizes = communicator.all_gather(np.array([len(own)]), name=f"{name}/sizes").tolist()
    own = own if isinstance(own, bytearray) else bytearray(own)
    parts = [own] * len(sizes)
    try:
        for rank in set(range(len(sizes))) - {communicator.rank}:
            parts[rank] = bytearray(sizes[rank])
    except (MemoryError, OverflowError):
        # The others wait for this rank by now.
        communicator._native.fail_without_memory(sum(sizes), f"all_gather {name!r}")
    collective = _native.Collective.all_gather(sizes)
    return communicator._run(arrays.Call(collective, parts, parts, (sum(sizes),)), name)


def broadcast_bytes(
    communicator: Collectives, own: str | bytearray, root: int, name: str
) -> bytearray:
    """What one rank has, bytes or text in ASCII, on every other rank; on that one, nothing.

    It travels in pieces, so that text is never whole in memory as bytes, too.
    """
    size = np.array([len(own)])
    communicator.broadcast(size, root, name=f"{name}/size")
    total, is_root = int(size[0]), communicator.rank == root
    try:
        received = bytearray(0 if is_root else total)
    except (MemoryError, OverflowError):
        # The others wait for this rank by now.
        communicator._native.fail_without_memory(total, f"broadcast {name!r}")
    for start in range(0, total, _PIECE_BYTES):
        communicator.broadcast(_piece(own if is_root else received, start), root, name=name)
    return received


def _piece(of: str | bytearray, start: int) -> bytearray | memoryview:
    """Bytes of the piece that begins there; those of text are a copy."""
    part = slice(start, start + _PIECE_BYTES)
    return bytearray(of[part], "ascii") if isinstance(of, str) else memoryview(of)[part]


def _in_bytes(text: str) -> bytearray:
    """Text in ASCII, without the second copy that Python would make meanwhile."""
    found = bytearray(len(text))
    for start in range(0, len(text), _PIECE_BYTES):
        found[start : start + _PIECE_BYTES] = _piece(text, start)
    return found


def _name_of_object(name: str, pickled: bool) -> str:
    """What ranks compare: those that pickle do not understand those that do not."""
    return (name or "object") + ("/pickled" if pickled else "")
