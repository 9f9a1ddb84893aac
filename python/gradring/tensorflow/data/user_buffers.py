"""Copies of batches in memory that belongs to the program, such as slices of an array.

TensorFlow does not copy an array that Python code in a dataset returns (`from_generator`, the
generators and `PyDataset`s of Keras, `tf.numpy_function`). It knows that it does not own this
memory, but loses this knowledge with a slice: the buffer of a slice is always marked as owned. A
strategy slices every batch into the replicas' parts. An op can then write its result into a slice,
which looks like a temporary, and overwrite the labels of the program.

So these batches are copied before they are divided.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import tensorflow as tf

from gradring.tensorflow.graph import compat


def owned(dataset: tf.data.Dataset, ops: Set[str]) -> tf.data.Dataset:
    """Returns the dataset with elements that TensorFlow owns; itself without Python code in it.

    Args:
        dataset: A `tf.data.Dataset`.
        ops: Its `ops_of`.
    """
    if not compat.PYTHON_OPS & ops:
        return dataset

    def copied(*parts: Any) -> Any:
        flat = tf.nest.flatten(parts, expand_composites=True)
        # None has no tensors in the spec.
        leaves = [_copy(leaf) for leaf in flat if leaf is not None]
        return tf.nest.pack_sequence_as(dataset.element_spec, leaves, expand_composites=True)

    return dataset.map(tf.autograph.experimental.do_not_convert(copied))


def _copy(leaf: Any) -> Any:
    # TensorFlow copies strings from Python anyway.
    if not isinstance(leaf, tf.Tensor) or leaf.dtype in (tf.string, tf.variant, tf.resource):
        return leaf
    return tf.ensure_shape(tf.raw_ops.DeepCopy(x=leaf), leaf.shape)


def ops_of(dataset: tf.data.Dataset) -> set[str]:
    """Returns the types of a dataset and its inputs, and those of all ops in their functions."""
    found: set[str] = set().union(*map(ops_of, compat.inputs_of(dataset)))
    found.add(type(dataset).__name__)
    for wrapper in compat.functions_of(dataset):
        found |= compat.ops_in(wrapper.function.graph.as_graph_def())
    return found
