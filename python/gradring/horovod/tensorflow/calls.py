"""Comparison of calls on tensors between ranks, and `join`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from gradring.errors import MismatchError
from gradring.gradients.names import Label
from gradring.gradients.reduction import Collective
from gradring.group.collectives import named
from gradring.group.communicator import Communicator
from gradring.horovod import basics
from gradring.horovod.negotiation import JOIN, RUN, Call, differing, joined, negotiate
from gradring.tensorflow import all_reduce
from gradring.tensorflow.graph.compat import eager_mode
from gradring.tensorflow.graph.failures import as_both
from gradring.tensorflow.graph.session_order import Running, compare_runs
from gradring.tensorflow.graph.start_wait import reduce

#: Kind of calls to which a joined rank can contribute zeros.
_WITH_JOINED = "allreduce"


def executing_eagerly() -> bool:
    """Returns True if calls run at once, and not when a graph is executed."""
    return bool(tf.executing_eagerly())


def is_for_sessions() -> bool:
    """Returns True if calls belong to a graph for sessions of TensorFlow 1."""
    graph = tf.compat.v1.get_default_graph()
    return not executing_eagerly() and not graph.building_function


def check_happens_now(function: str) -> None:
    """Refuses a call inside a `tf.function`, which would run only once, in the trace.

    Raises:
        RuntimeError: The call is inside a `tf.function`.
    """
    if tf.compat.v1.get_default_graph().building_function:
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
    happens_now: bool | None = None,
) -> None:
    """Compares a call with those of the other ranks, if it runs at once.

    Args:
        communicator: The group.
        kind: The function.
        name: As in `Call`.
        tensors: The tensors of the call.
        how: As in `Call`.
        rows_differ: True if their first dimensions can differ between ranks.
        variables: As in `Call`.
        happens_now: True to compare; default: True if TensorFlow executes eagerly.

    Raises:
        error: The calls differ, or a rank has joined and cannot contribute. The exception is a
            `MismatchError` and also a `tf.errors.FailedPreconditionError`, as in Horovod. All ranks
            raise it, and the group stays usable.
    """
    if happens_now is None:
        happens_now = executing_eagerly()
    if communicator.world_size == 1 or not happens_now:
        return
    shapes = [tensor.shape.as_list() for tensor in tensors]
    if rows_differ:
        shapes = [[None, *shape[1:]] for shape in shapes]
    dtypes = [tensor.dtype.name for tensor in tensors]
    _require_equal(communicator, Call(kind, name, how, dtypes, shapes, variables))


def _require_equal_runs(communicator: Communicator, collectives: Sequence[Running]) -> None:
    """Compares the next runs of the ranks' sessions."""
    if communicator.world_size > 1:
        parts = [
            Call(
                each.kind.replace("_", ""),
                each.label.compared,
                each.op or (f"root {each.root}" if each.kind == "broadcast" else ""),
                [each.dtype] * len(each.shapes),
                each.shapes,
                shown=each.label.shown,
            )
            for each in collectives
        ]
        how = "sometimes" if any(each.sometimes for each in collectives) else ""
        _require_equal(communicator, Call(RUN, how=how, parts=parts))


compare_runs(_require_equal_runs)


def _require_equal(communicator: Communicator, own: Call) -> None:
    calls = negotiate(communicator, own)
    pair = differing(calls)
    if pair is not None:
        said = [calls[one].without_equal_parts(calls[other]) for one, other in (pair, pair[::-1])]
        texts = [
            f"{named(communicator, rank)} calls {call}"
            for rank, call in zip(pair, said, strict=True)
        ]
        error = _mismatch(
            f"{texts[0]}, and {texts[1]}; every rank must call the same in the same order, with "
            "the same shapes and dtypes",
            (pair[1], communicator.hosts[pair[1]], said[1]),
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

    For ranks that have run out of data while others still reduce eagerly. These reductions are
    `allreduce`, `grouped_allreduce` and gradients without `tf.IndexedSlices`, by `Sum` or
    `Average`, whose divisor stays `size()`. Collectives inside a `tf.function` or in the backward
    pass of a tape do not support joined ranks: a `MismatchError` ends the group.
    `gradring.tensorflow.join` of the batches works everywhere.

    In a graph for sessions of TensorFlow 1, the result is a tensor; running it, without other
    fetches, joins. The other ranks can then run only reductions of the above kinds, with known
    shapes.

    Returns:
        The rank that joined last, equal on all ranks; int32.

    Raises:
        RuntimeError: The call is inside a `tf.function`.
        gradring.errors.GradringError: The group failed.

    Examples:
        >>> batches = [4.0, 4.0] if hvd.rank() == 0 else [4.0]
        >>> for batch in batches:
        ...     float(hvd.allreduce(batch))
        4.0
        2.0
        >>> int(hvd.join())  # the rank that had most
        0
    """
    check_happens_now("join")
    communicator = basics.communicator()
    if executing_eagerly():
        return tf.constant(_join(communicator), tf.int32)
    joining = tf.numpy_function(lambda: np.int32(_join(communicator)), [], tf.int32, name="join")
    joining.set_shape([])
    return joining


def _join(communicator: Communicator) -> int:
    rounds = 0
    while communicator.world_size > 1:
        calls = negotiate(communicator, JOIN)
        present = [call for call in calls if call.kind != JOIN.kind]
        if not present:
            break
        rounds += 1
        if differing(calls) is None and _takes_zeros(present[0]):
            with eager_mode():
                _contribute_zeros(communicator, present[0])
    waited = communicator.all_gather(rounds, name="horovod/join")
    return max(rank for rank, count in enumerate(waited) if count == waited.min())


def _takes_zeros(call: Call) -> bool:
    if call.kind == RUN:
        return call.how == "" and all(
            _takes_zeros(part) and all(_is_known(shape) for shape in part.shapes)
            for part in call.parts
        )
    return call.kind == _WITH_JOINED and call.how in ("sum", "mean")


def _is_known(shape: Sequence[int | None] | None) -> bool:
    return shape is not None and None not in shape


def _contribute_zeros(communicator: Communicator, call: Call) -> None:
    if call.parts:
        # A run is a step, and ranks compare the steps of collectives.
        with communicator.step():
            for part in call.parts:
                label = Label(part.shown, part.name)
                reduce(_zeros(part), Collective(communicator, label, part.how))
    else:
        all_reduce(_zeros(call), call.how, call.name, communicator, variables=call.variables)


def _zeros(call: Call) -> list[tf.Tensor]:
    return [
        tf.zeros([size or 0 for size in shape or ()], dtype)
        for dtype, shape in zip(call.dtypes, call.shapes, strict=True)
    ]


def _mismatch(text: str, blamed: tuple[int, str, Call]) -> MismatchError:
    rank, host, call = blamed
    facts: dict[str, Any] = {"rank": rank, "host": host, "collective": str(call)}
    error: MismatchError = as_both(MismatchError, tf.errors.FailedPreconditionError, text, facts)
    return error
