"""Functions of notebook cells on several ranks, as accelerate's ``notebook_launcher``.

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
__dir__ = __all__.copy


def run(
    fn: Callable[..., Any],
    ranks: int = 2,
    args: Sequence[Any] = (),
    *,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> list[Any]:
    """Calls ``fn(*args)`` on every rank of a new world, and prints the ranks' output.

    Each rank is a new interpreter. So the notebook can have imported TensorFlow, and its variables
    do not change. The function can be defined in a cell: cloudpickle sends its code, with the
    values of the names that it uses. Load large arrays inside the function, on each rank. Also make
    objects of a single process inside it: strategies, communicators, open files.

    A line of rank 1 has the prefix ``[1]`` and is shown once it is complete. A progress bar is
    shown in its newest state, every two seconds. An interrupt of the cell ends the ranks.

    Args:
        fn: A function of a cell or a module. ``gradring.init()`` in it needs no arguments.
        ranks: Number of ranks, default 2. They share the cores of this machine.
        args: The function's arguments, the same on every rank.
        env: More variables for every rank; default none.
        timeout: Time limit of the call in seconds; default None, no limit.

    Returns:
        The results of ``fn``, in rank order.

    Raises:
        gradring.testing.RankFailure: A rank raised, exited (even with code 0), or its process died;
            the error names the rank that failed first, and has its traceback.
        gradring.testing.RankTimeout: Ranks had not finished in time, and were killed.
        ModuleNotFoundError: cloudpickle is not installed.
        TypeError: An argument is of another type, or ``fn`` or ``args`` cannot be pickled.
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
    return call_on_ranks(call, ranks, timeout, env=env, on_line=_show)


def _show(rank: int, line: str) -> None:
    print(f"[{rank}] {line}", flush=True)
