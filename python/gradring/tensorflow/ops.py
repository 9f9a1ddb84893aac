"""Collectives on TensorFlow tensors, eagerly and inside a `tf.function`.

A call emits the Starts of all its buckets before its first Wait, so that communication overlaps
whatever else the graph still has to compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gradring
import tensorflow as tf
from gradring.communicator import Communicator, open_communicators
from gradring.errors import ConfigError
from gradring.tensorflow import bucketing
from gradring.tensorflow.dtypes import as_native, as_native_bits
from gradring.tensorflow.failures import typed_errors
from gradring.tensorflow.start_wait import start, start_all_gather, wait

_REDUCE_OPS = ("sum", "mean", "min", "max", "product")

#: Keeps a communicator alive that nobody else knows of.
_made_here: Communicator | None = None


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def all_reduce(
    tensors: Any,
    op: str = "sum",
    name: str | None = None,
    communicator: Communicator | None = None,
    *,
    bucket_bytes: int = bucketing.DEFAULT_BUCKET_BYTES,
) -> Any:
    """Reduces tensors over all ranks; every rank gets the same bits.

    Every rank must call it with the same structure, shapes, dtypes, `op` and `name`, and in the
    same order among its other collectives. Gradients flow through "sum" and "mean".

    Args:
      tensors: a tensor, or a nest of tensors, of any shapes; float32, float64, float16, bfloat16,
        int8, int16, int32, int64, uint8, uint16 or uint32. `tf.IndexedSlices` are allowed for
        "sum" and "mean". Pass gradients in the order of their variables: they are started last
        first, as a backward pass produces them.
      op: "sum" (default), "mean", "min", "max" or "product". The integer mean is an integer,
        rounded towards zero.
      name: shown in messages and compared between ranks; default "all_reduce".
      communicator: what to reduce over; default that of the current strategy, or else the only
        one that is open, or else a new one from `gradring.init()`.
      bucket_bytes: bound on the tensors that travel together, in bytes; default 16 MiB.

    Returns:
      The reduced tensors, in the structure of `tensors`.

    Raises:
      TypeError: a dtype cannot be reduced.
      ValueError: `op` is unknown, or does not exist for `tf.IndexedSlices`.
      tf.errors.AbortedError: the collective failed; names the rank to blame. Executing eagerly, it
        is an exception of `gradring.errors` as well.
    """
    if op not in _REDUCE_OPS:
        raise ValueError(f"op={op!r} is no reduce op; use one of {', '.join(_REDUCE_OPS)}")
    label = name or "all_reduce"
    comm = communicator or current_communicator()
    leaves = tf.nest.flatten(tensors)
    dense = [i for i, leaf in enumerate(leaves) if not isinstance(leaf, tf.IndexedSlices)]
    with typed_errors():
        reduced = _all_reduce_dense([leaves[i] for i in dense], op, label, comm, bucket_bytes)
        results: list[Any] = list(leaves)
        for position, value in zip(dense, reduced, strict=True):
            results[position] = value
        for position in sorted(set(range(len(leaves))) - set(dense)):
            results[position] = _all_reduce_sparse(
                leaves[position], op, f"{label}/{position}", comm
            )
    return tf.nest.pack_sequence_as(tensors, results)


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def broadcast(
    value: Any, root: int = 0, name: str | None = None, communicator: Communicator | None = None
) -> Any:
    """Gives every rank the root's tensor.

    Args:
      value: a tensor; the same shape and dtype on every rank. Any dtype of fixed width.
      root: the rank whose contents win; default 0.
      name: shown in messages and compared between ranks; default "broadcast".
      communicator: as for `all_reduce`.

    Returns:
      A tensor like `value`.

    Raises:
      TypeError: the dtype has no fixed width, such as string.
      tf.errors.AbortedError: as for `all_reduce`.
    """
    label = name or "broadcast"
    comm = communicator or current_communicator()
    value = tf.convert_to_tensor(value)
    encoded, decode = as_native_bits(value, label)
    with typed_errors():
        started = start([encoded], comm, label, collective="broadcast", root=root)
        return decode(wait([started])[0][0])


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def broadcast_variables(
    variables: Sequence[Any], root: int = 0, communicator: Communicator | None = None
) -> None:
    """Assigns the root's values to the variables of every rank.

    Args:
      variables: `tf.Variable`s or Keras variables, the same list on every rank.
      root: the rank whose values win; default 0.
      communicator: as for `all_reduce`.

    Raises:
      As `broadcast`.
    """
    for index, variable in enumerate(variables):
        name = f"{index}/{getattr(variable, 'name', 'variable')}"
        value = tf.convert_to_tensor(variable)
        variable.assign(broadcast(value, root, name, communicator))


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def all_gather(
    value: Any, name: str | None = None, communicator: Communicator | None = None
) -> Any:
    """Concatenates every rank's tensor along the first dimension, in rank order.

    Args:
      value: a tensor of at least one dimension; ranks may differ in the size of the first. Dtypes
        as for `all_reduce`.
      name: shown in messages and compared between ranks; default "all_gather".
      communicator: as for `all_reduce`.

    Returns:
      A tensor of shape `[sum of the first dimensions, ...]`.

    Raises:
      As `all_reduce`; ValueError for a scalar.
    """
    label = name or "all_gather"
    comm = communicator or current_communicator()
    value = tf.convert_to_tensor(value)
    if value.shape.rank == 0:
        raise ValueError(f"{label}: a scalar has no dimension to gather along; reshape it to [1]")
    native, decode = as_native(value, label)
    own = tf.one_hot(comm.rank, comm.world_size, tf.shape(native, tf.int64)[0], dtype=tf.int64)
    with typed_errors():
        counts = _all_reduce_dense([own], "sum", f"{label}/rows", comm)[0]
        started = start_all_gather(native, counts, comm, label)
        gathered = decode(wait([started])[0][0])
    if not tf.executing_eagerly():
        gathered.set_shape([None, *value.shape[1:]])
    return gathered


def current_communicator() -> Communicator:
    """The communicator of the current strategy, or the only one that is open, or a new one.

    Raises:
      gradring.errors.ConfigError: several are open.
      gradring.errors.RendezvousError: none is open, and the group could not be formed.
    """
    strategy = tf.distribute.get_strategy() if tf.distribute.has_strategy() else None
    if strategy is not None and isinstance(getattr(strategy, "communicator", None), Communicator):
        return strategy.communicator  # type: ignore[no-any-return]
    candidates = open_communicators()
    if len(candidates) > 1:
        raise ConfigError(
            f"{len(candidates)} communicators are open in this process of rank "
            f"{candidates[0].rank} on {candidates[0].host}; pass one as communicator="
        )
    global _made_here
    if not candidates:
        _made_here = gradring.init()
        return _made_here
    return candidates[0]


def _all_reduce_dense(
    values: Sequence[Any],
    op: str,
    label: str,
    communicator: Communicator,
    bucket_bytes: int = bucketing.DEFAULT_BUCKET_BYTES,
) -> list[Any]:
    encoded = [as_native(tf.convert_to_tensor(value), label) for value in values]
    # Last first: the order in which a backward pass produces gradients.
    backwards = [native for native, _ in reversed(encoded)]
    buckets = bucketing.plan([_entry(tensor) for tensor in backwards], bucket_bytes)
    started = [
        start(
            [backwards[i] for i in bucket.indices],
            communicator,
            label if len(buckets) == 1 else f"{label}/{number}",
            collective="all_reduce",
            reduce_op=op,
        )
        for number, bucket in enumerate(buckets)
    ]
    results: list[Any] = [None] * len(backwards)
    for bucket, reduced in zip(buckets, wait(started), strict=True):
        for position, tensor in zip(bucket.indices, reduced, strict=True):
            results[position] = tensor
    return [decode(result) for result, (_, decode) in zip(reversed(results), encoded, strict=True)]


def _all_reduce_sparse(value: Any, op: str, label: str, communicator: Communicator) -> Any:
    """The sum of every rank's rows; no index occurs twice.

    Optimizers rely on that: Keras' Adam squares row by row, so it would square the summands.
    """
    if op not in ("sum", "mean"):
        raise ValueError(
            f"{label}: op={op!r} does not exist for tf.IndexedSlices; "
            "use tf.convert_to_tensor to make it dense"
        )
    # Fewer rows travel when those of one index have been added up.
    values, indices = _without_duplicates(value.values, tf.convert_to_tensor(value.indices))
    values = all_gather(values, f"{label}/values", communicator)
    indices = all_gather(indices, f"{label}/indices", communicator)
    values, indices = _without_duplicates(values, indices)
    if op == "mean":
        values /= tf.cast(communicator.world_size, values.dtype)
    return tf.IndexedSlices(values, indices, value.dense_shape)


def _without_duplicates(values: Any, indices: Any) -> tuple[Any, Any]:
    """The rows of one index added up; an index keeps its first place."""
    unique, segments = tf.unique(indices)
    return tf.math.unsorted_segment_sum(values, segments, tf.size(unique)), unique


def _entry(tensor: Any) -> bucketing.Entry:
    count = tensor.shape.num_elements()
    size_bytes = None if count is None else count * tensor.dtype.size
    return bucketing.Entry(tensor.dtype.name, size_bytes)
