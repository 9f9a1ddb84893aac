"""Collectives over Python objects, by pickle as in Horovod."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradring.horovod.process_sets import ProcessSet, communicator_of, global_process_set, place_in
from gradring.horovod.tensorflow.calls import check_happens_now, require_equal_calls

__all__ = ["allgather_object", "broadcast_object", "broadcast_object_fn"]


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Gives every rank the root's object.

    A pickle can run code of its sender. So the group needs a token or TLS, unless all ranks listen
    on the loopback interface of one host.

    Args:
        obj: An object that can be pickled.
        root_rank: The rank whose object is sent.
        session: Must be None.
        name: Compared between ranks, and used in messages.
        process_set: The participating processes.

    Returns:
        The object itself on the root, a copy on other ranks.

    Raises:
        RuntimeError: The call is inside a `tf.function`.
        gradring.errors.ConfigError: A foreign process could join: there is no token and no TLS.
        gradring.errors.MismatchError: The ranks' calls differ.

    Examples:
        >>> hvd.broadcast_object({"resume at": 100 * hvd.rank()}, root_rank=1)
        {'resume at': 100}
    """
    check_happens_now("broadcast_object")
    communicator = communicator_of(process_set)
    label = name or "broadcast_object"
    require_equal_calls(
        communicator, "broadcast_object", label, [], how=f"root {root_rank}", happens_now=True
    )
    root = place_in(process_set, root_rank)
    return communicator.broadcast_object(obj, root, pickle=True, name=label)


def broadcast_object_fn(
    root_rank: int = 0,
    session: None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Returns `broadcast_object` as a function of the object.

    Args:
        root_rank: As in `broadcast_object`.
        session: As in `broadcast_object`.
        name: As in `broadcast_object`.
        process_set: As in `broadcast_object`.

    Examples:
        >>> of_rank_1 = hvd.broadcast_object_fn(root_rank=1)
        >>> of_rank_1(["a", hvd.rank()])
        ['a', 1]
    """
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(
    obj: Any,
    session: None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Returns the objects of all ranks by rank, its own object itself; see `broadcast_object`.

    Args:
        obj: An object that can be pickled.
        session: Must be None.
        name: Compared between ranks, and used in messages.
        process_set: The participating processes.

    Raises:
        RuntimeError: The call is inside a `tf.function`.
        gradring.errors.ConfigError: A foreign process could join: there is no token and no TLS.
        gradring.errors.MismatchError: The ranks' calls differ.

    Examples:
        >>> hvd.allgather_object({"rank": hvd.rank(), "rows": 100 + hvd.rank()})
        [{'rank': 0, 'rows': 100}, {'rank': 1, 'rows': 101}]
    """
    check_happens_now("allgather_object")
    communicator = communicator_of(process_set)
    label = name or "allgather_object"
    require_equal_calls(communicator, "allgather_object", label, [], happens_now=True)
    return communicator.all_gather_object(obj, pickle=True, name=label)
