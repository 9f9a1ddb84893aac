"""Cells of a notebook on several ranks of this machine, as accelerate's ``notebook_launcher``.

::

    def train(epochs):
        strategy = gradring.tensorflow.CustomCollectiveStrategy()
        ...
        return history.history["loss"]

    losses = gradring.notebook.run(train, 2, args=(3,))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gradring.testing.function import FunctionByValue
from gradring.testing.harness import call_on_ranks
from gradring.testing.worker import Call

__all__ = ["run"]


def run(
    fn: Callable[..., Any],
    ranks: int = 2,
    args: Sequence[Any] = (),
    *,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> list[Any]:
    """Calls ``fn(*args)`` on every rank of a new world, and prints what the ranks print.

    Each rank is a fresh interpreter, so the notebook may have imported TensorFlow, and nothing of
    what it has computed changes. The function may come from a cell: its code travels, with the
    values of the names that it uses, by cloudpickle. Large arrays are better read by each rank, and
    what belongs to one process (a strategy, a communicator, an open file) is made in the function.

    A line of rank 1 begins with ``[1]`` and is shown as soon as it is whole; of a progress bar, the
    newest state every two seconds. An interrupt of the cell ends the ranks.

    Args:
        fn: A function, of a cell or of a module. ``gradring.init()`` in it needs no arguments.
        ranks: How many; default 2. They share the cores of this machine.
        args: Its arguments, the same on every rank.
        env: More variables for every rank; default none.
        timeout: Seconds for all of it; default None, no limit.

    Returns:
        What it returned on each rank, in rank order.

    Raises:
        gradring.testing.RankFailure: A rank raised, exited (even with code 0), or its process died;
            names the one that failed first, whose traceback is among its lines.
        gradring.testing.RankTimeout: Ranks had not finished in time, and were killed.
        ModuleNotFoundError: There is no cloudpickle.
        TypeError: An argument is of another type, or ``fn`` or ``args`` cannot travel.
        ValueError: ``ranks`` is below one, or ``timeout`` not above zero.

    Examples:
        >>> def total(first):
        ...     with gradring.init() as comm:
        ...         if comm.rank == 0:
        ...             print("ranks:", comm.world_size)
        ...         return comm.all_reduce(np.full(2, first + comm.rank)).tolist()
        >>> gradring.notebook.run(total, ranks=2, args=(10,))
        [0] ranks: 2
        [[21, 21], [21, 21]]
    """
    if not callable(fn) or not isinstance(ranks, int) or not isinstance(args, list | tuple):
        raise TypeError(
            f"run({fn!r}, {ranks!r}, args={args!r}): give a function, a number of ranks, and a "
            "tuple of arguments"
        )
    call = Call.of(FunctionByValue.of(fn), tuple(args))
    return call_on_ranks(call, ranks, timeout, env=env, hear=_show)


def _show(rank: int, line: str) -> None:
    print(f"[{rank}] {line}", flush=True)
