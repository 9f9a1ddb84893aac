"""Calls on tensors: what ranks compare before one, and what becomes of a difference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from gradring.errors import MismatchError
from gradring.group.collectives import named
from gradring.group.communicator import Communicator
from gradring.horovod import basics
from gradring.horovod.negotiation import JOIN, Call, differing, joined, negotiate
from gradring.tensorflow import all_reduce
from gradring.tensorflow.failures import as_both

#: What a rank that has joined can take part in, by contributing zeros.
_WITH_JOINED = "allreduce"


def executing_eagerly() -> bool:
    """Whether calls happen now, and not when a graph executes."""
    return bool(tf.executing_eagerly())


def check_happens_now(function: str) -> None:
    """Refuses a function that a graph cannot repeat.

    Raises:
        RuntimeError: It is called inside a `tf.function`.
    """
    if not executing_eagerly():
        raise RuntimeError(
            f"hvd.{function}() would happen once, when a tf.function is traced; call it outside"
        )


def require_equal_calls(
    communicator: Communicator,
    kind: str,
    name: str,
    tensors: Sequence[tf.Tensor],
    *,
    how: str = "",
    rows_differ: bool = False,
    variables: Sequence[str] | None = None,
) -> None:
    """Compares a call with those of the other ranks, where it happens now.

    Args:
        communicator: The group.
        kind: The function.
        name: As for `Call`.
        tensors: Its arguments.
        how: As for `Call`.
        rows_differ: Whether their first dimensions may differ between ranks.
        variables: As for `Call`.

    Raises:
        error: The calls differ, or a rank has joined that cannot take part: a `MismatchError` that
            is also a `tf.errors.FailedPreconditionError`, as in Horovod. All ranks raise it, and
            the group goes on.
    """
    if communicator.world_size == 1 or not executing_eagerly():
        return
    shapes = [tensor.shape.as_list() for tensor in tensors]
    if rows_differ:
        shapes = [[None, *shape[1:]] for shape in shapes]
    own = Call(kind, name, how, [tensor.dtype.name for tensor in tensors], shapes, variables)
    calls = negotiate(communicator, own)
    pair = differing(calls)
    if pair is not None:
        one, other = ((rank, communicator.hosts[rank], calls[rank]) for rank in pair)
        error = _mismatch(
            f"{named(communicator, one[0])} calls {one[2]}, and {named(communicator, other[0])} "
            f"calls {other[2]}; every rank must call the same in the same order, with the same "
            "shapes and dtypes",
            other,
        )
        raise error
    absent = joined(calls)
    if absent and not _takes_zeros(own):
        rank = absent[0]
        error = _mismatch(
            f"{named(communicator, rank)} has called join(), and cannot take part in "
            f"{own}: only allreduce with hvd.Sum and hvd.Average goes on without it",
            (rank, communicator.hosts[rank], own),
        )
        raise error


def join() -> tf.Tensor:
    """Contributes zeros to reductions until all ranks have called it.

    For ranks that have run out of data, where the others reduce eagerly: `allreduce`,
    `grouped_allreduce` and gradients without `tf.IndexedSlices`, by `Sum` or `Average`, whose
    divisor stays `size()`. Inside a `tf.function`, and for what a tape reduces backwards, nobody
    waits for those that have joined: a `MismatchError` ends the group there.
    `gradring.tensorflow.join` of the batches works everywhere.

    Returns:
        The rank that came last, the same on all ranks; int32.

    Raises:
        RuntimeError: It is called inside a `tf.function`.
        gradring.errors.GradringError: The group failed.
    """
    check_happens_now("join")
    communicator = basics.communicator()
    rounds = 0
    while communicator.world_size > 1:
        calls = negotiate(communicator, JOIN)
        present = [call for call in calls if call.kind != JOIN.kind]
        if not present:
            break
        rounds += 1
        if differing(calls) is None and _takes_zeros(present[0]):
            _contribute_zeros(communicator, present[0])
    waited = communicator.all_gather(rounds, name="horovod/join")
    last = max(rank for rank, count in enumerate(waited) if count == waited.min())
    return tf.constant(last, tf.int32)


def _takes_zeros(call: Call) -> bool:
    return call.kind == _WITH_JOINED and call.how in ("sum", "mean")


def _contribute_zeros(communicator: Communicator, call: Call) -> None:
    zeros = [
        tf.zeros([size or 0 for size in shape], dtype)
        for dtype, shape in zip(call.dtypes, call.shapes, strict=True)
    ]
    all_reduce(zeros, call.how, call.name, communicator, variables=call.variables)


def _mismatch(text: str, blamed: tuple[int, str, Call]) -> MismatchError:
    rank, host, call = blamed
    facts: dict[str, Any] = {"rank": rank, "host": host, "collective": str(call)}
    error: MismatchError = as_both(MismatchError, tf.errors.FailedPreconditionError, text, facts)
    return error
