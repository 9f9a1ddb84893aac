"""All-reduce of a list of tensors: dense ones in buckets, `tf.IndexedSlices` by their rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from gradring.gradients.buckets import Entry
from gradring.gradients.reduction import Reduction
from gradring.tensorflow.graph import replica_step
from gradring.tensorflow.graph.backward_order import start_as_soon_as_ready
from gradring.tensorflow.graph.dtypes import as_native, as_tensor, with_dtype
from gradring.tensorflow.graph.sparse import reduce_sparse
from gradring.tensorflow.graph.start_wait import start, wait

#: A value to reduce, or a result.
Leaf: TypeAlias = "tf.Tensor | tf.IndexedSlices"
#: A variable of TensorFlow, or one of Keras 3, which is no subclass of it.
Variable: TypeAlias = "tf.Variable | tf.keras.Variable"


def reduce_leaves(
    leaves: Sequence[Leaf],
    reduction: Reduction,
    variables: Sequence[Variable | str] | None = None,
) -> list[Leaf]:
    """Reduces tensors of any shapes, listed in the order of their variables.

    Args:
        leaves: The tensors.
        reduction: Group, op, names and options of the reduction.
        variables: The variables of these gradients, if known; names among them are ignored.

    Returns:
        The results, in order, of the shapes and dtypes of the leaves. Results for
        `tf.IndexedSlices` have the rows of all ranks, or their sums.

    Raises:
        TypeError: A leaf is no tensor, or its dtype cannot be reduced.
        ValueError: The op does not exist for `tf.IndexedSlices`.
    """
    sparse = [i for i, leaf in enumerate(leaves) if isinstance(leaf, tf.IndexedSlices)]
    dense = sorted(set(range(len(leaves))) - set(sparse))
    results = list(leaves)
    _reduce_dense(results, dense, reduction)
    if sparse:
        reduce_sparse(results, sparse, reduction)
    known = [variable for variable in variables or () if not isinstance(variable, str)]
    replica_step.note_reduced(results, known)
    return results


def with_known_shapes(gradients: Sequence[Any], variables: Sequence[Any]) -> Sequence[Any]:
    """Sets the shapes of gradients to those of their variables, and returns the gradients.

    A graph does not know all shapes, such as that of a `Dense` kernel's gradient for batches of any
    size. A tensor of unknown size would travel alone, in a bucket of its own.
    """
    for gradient, variable in zip(gradients, variables, strict=True):
        shape = getattr(variable, "shape", None)
        is_of_graph = isinstance(gradient, tf.Tensor) and tf.is_symbolic_tensor(gradient)
        if is_of_graph and shape is not None and gradient.shape.is_compatible_with(shape):
            gradient.set_shape(shape)
    return gradients


def _reduce_dense(results: list[Leaf], positions: Sequence[int], reduction: Reduction) -> None:
    """Replaces the dense tensors at `positions` by their reductions."""
    # Last first: the order in which a backward pass produces gradients.
    encoded, entries = {}, {}
    for position in reversed(positions):
        label = reduction.names.of([position]).shown
        results[position] = tensor = as_tensor(results[position], label)
        encoded[position] = as_native(tensor, label)
        entries[position] = _entry(tensor.dtype, encoded[position][0])
    buckets = reduction.buckets(entries)
    tensors = [[encoded[i][0] for i in members] for members, _ in buckets]
    started = [
        start(bucket, with_dtype(collective, results[members[0]]))
        for bucket, (members, collective) in zip(tensors, buckets, strict=True)
    ]
    start_as_soon_as_ready(tensors, [handle for *_, handle in started])
    for (members, _), reduced in zip(buckets, wait(started), strict=True):
        for position, tensor in zip(members, reduced, strict=True):
            _, decode = encoded[position]
            results[position] = decode(tensor)


def _entry(dtype: tf.DType, native: tf.Tensor) -> Entry:
    count = native.shape.num_elements()
    size_bytes = None if count is None else count * native.dtype.size
    return Entry(dtype.name, size_bytes)
