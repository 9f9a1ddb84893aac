"""`join`, for ranks whose own batches end at different times."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from gradring.errors import ConfigError
from gradring.group.collectives import named
from gradring.group.communicator import Communicator
from gradring.tensorflow.graph.ops import group_of
from gradring.tensorflow.keras import compat_keras, empty_batches

Batch = TypeVar("Batch")

_END = object()


def join(batches: Iterable[Batch], communicator: Communicator | None = None) -> Iterator[Batch]:
    """Yields this rank's batches, and then empty ones until every rank's have ended.

    So all ranks take the same number of steps, even if they have different numbers of batches. A
    rank without further batches trains on batches of no samples. Unlike with the `join` of Horovod
    and PyTorch, all ranks apply the same updates until the end.

    Layers of Keras can handle empty batches. If TensorFlow cannot compute zero rows, a layer
    computes one row and drops it; the row counts neither in statistics nor in gradients. Other code
    must handle empty batches itself. A mean over no samples is NaN, which a `GradientReducer`
    ignores for `samples=0`.

    Before every step, the ranks exchange 8 bytes each to learn whether any has a batch left.
    Datasets of `strategy.experimental_distribute_dataset` end together anyway, and do not need it.

    Args:
        batches: A `tf.data.Dataset`, or any iterable, eagerly, of tensors or numpy arrays, or nests
            of them. The first dimension of each tensor counts samples. Every rank must call it, and
            iterate to the end.
        communicator: As for `all_reduce`.

    Yields:
        The batches, then empty ones of the same structure, dtypes and shapes, with 0 for the first
        dimension.

    Raises:
        gradring.errors.ConfigError: On every rank, if one rank has no batch at all and its
            `batches` is no `tf.data.Dataset` of dense tensors. The shape of its empty batches is
            unknown then.
        gradring.errors.PeerLostError: Another rank has left the loop before the end.
        gradring.errors.GradringError: As for `gradring.Communicator.all_reduce`.
        TypeError: A batch contains a value without a first dimension.

    Examples:
        >>> weight, reduce_gradients = tf.Variable(1.0), gradring.tensorflow.GradientReducer()
        >>> batches = [tf.ones([2]), tf.ones([2])][: rank + 1]  # rank 0 has one, rank 1 two
        >>> for x in gradring.tensorflow.join(batches):
        ...     with tf.GradientTape() as tape:
        ...         loss = tf.reduce_mean(weight * x)
        ...     (gradient,) = reduce_gradients([tape.gradient(loss, weight)], samples=len(x))
        ...     print(len(x), float(gradient))
        2 1.0
        0 1.0
    """
    comm = group_of(communicator)
    compat_keras.repair()
    empty_batches.expect_outside()
    empty = _nothing(getattr(batches, "element_spec", None))
    iterator, has_begun = iter(batches), False
    while True:
        batch: Any = next(iterator, _END)
        if batch is not _END and not has_begun:
            empty, has_begun = tf.nest.map_structure(_none_of, batch), True
        goes_on, knows = int(batch is not _END), int(empty is not None)
        found = comm.all_gather(np.array([[goes_on, knows]]), name="join")
        if not found[:, 0].any():
            return
        if not found[:, 1].all():
            rank = int(np.flatnonzero(found[:, 1] == 0)[0])
            raise ConfigError(
                f"join: {named(comm, rank)} has no batch at all, so it cannot know "
                "what an empty one looks like; give it a batch, or all ranks a tf.data.Dataset "
                "of dense tensors",
                rank=rank,
                host=comm.hosts[rank],
            )
        yield empty if batch is _END else batch


def _none_of(part: Any) -> Any:
    """Returns the part of a batch without its rows."""
    if isinstance(part, tf.sparse.SparseTensor):
        shape = part.dense_shape
        return tf.sparse.slice(part, tf.zeros_like(shape), tf.concat([[0], shape[1:]], 0))
    if len(getattr(part, "shape", ())) == 0:
        raise TypeError(
            f"join: a {type(part).__name__} without dimensions in a batch has no empty form; "
            "batches consist of arrays whose first dimension is that of the samples"
        )
    return part[:0]


def _nothing(spec: Any) -> Any:
    """Returns an empty batch of an element spec, or None if the spec is not of dense tensors."""
    leaves = tf.nest.flatten(spec)
    if any(not isinstance(leaf, tf.TensorSpec) or not leaf.shape.rank for leaf in leaves):
        return None
    empty = [tf.zeros([0, *(size or 0 for size in leaf.shape[1:])], leaf.dtype) for leaf in leaves]
    return tf.nest.pack_sequence_as(spec, empty)
