"""Batches of a program for one process: their order, and their static sizes.

TensorFlow would divide files among the replicas, which changes the batches. So batches are divided
in any case.

A program for one process can rely on the size that ``batch(32, drop_remainder=True)`` fixes.
TensorFlow forgets this size if the dataset has an end, because a replica could have no batch then.
If each batch is divided evenly, all replicas have one, so the size can stay.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from gradring.tensorflow.graph import compat

_POLICIES = tf.data.experimental.AutoShardPolicy


def divided_by_elements(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a dataset whose batches are divided, unless the program chose another policy."""
    if dataset.options().experimental_distribute.auto_shard_policy != _POLICIES.AUTO:
        return dataset
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = _POLICIES.DATA
    return dataset.with_options(options)


def keep(distributed: Any, dataset: tf.data.Dataset, replicas: int) -> None:
    """Keeps the static size of each replica's batches if all replicas have the same.

    Args:
        distributed: The strategy's distributed form of `dataset`.
        dataset: A dataset of global batches.
        replicas: Number of replicas that divide each batch.
    """
    leaves = tf.nest.flatten(dataset.element_spec)
    sizes = {leaf.shape[0] if _is_batch(leaf) else None for leaf in leaves}
    if len(sizes) != 1:
        return
    (size,) = sizes
    if size is None or size % replicas or int(dataset.cardinality()) < 0:
        return
    if dataset.options().experimental_distribute.auto_shard_policy == _POLICIES.DATA:
        compat.let_batches_be_equal(distributed)


def _is_batch(leaf: Any) -> bool:
    return type(leaf) is tf.TensorSpec and bool(leaf.shape.rank)
