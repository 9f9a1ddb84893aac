"""Order of the indices of sparse batches, which TensorFlow needs in order to divide a batch.

A program for one process can have batches from scipy, whose indices are in any order.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def ordered(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the dataset with its sparse tensors in order; the dataset itself without any."""
    if not any(isinstance(it, tf.SparseTensorSpec) for it in tf.nest.flatten(dataset.element_spec)):
        return dataset

    def reordered(*parts: Any) -> Any:
        leaves = [_reordered(leaf) for leaf in tf.nest.flatten(parts)]
        return tf.nest.pack_sequence_as(dataset.element_spec, leaves)

    return dataset.map(tf.autograph.experimental.do_not_convert(reordered))


def _reordered(leaf: Any) -> Any:
    return tf.sparse.reorder(leaf) if isinstance(leaf, tf.sparse.SparseTensor) else leaf
