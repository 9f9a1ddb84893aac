"""Static sizes of batches: a replica's part of the size that a dataset fixes.

A program for one process can rely on the size that ``batch(32, drop_remainder=True)`` fixes.
TensorFlow forgets this size if the dataset has an end, because a replica could have no batch then.
If each batch is divided evenly, all replicas have one, so the size can stay.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from gradring.tensorflow.graph import compat

#: Parts of the names of all ops that read files. `AutoShardPolicy.AUTO` divides files among the
#: workers, and then some workers can have fewer batches.
_READERS = ("Record", "TextLine", "SSTable")


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
    if _is_divided_by_elements(dataset):
        compat.let_batches_be_equal(distributed)


def _is_batch(leaf: Any) -> bool:
    return type(leaf) is tf.TensorSpec and bool(leaf.shape.rank)


def _is_divided_by_elements(dataset: tf.data.Dataset) -> bool:
    policies = tf.data.experimental.AutoShardPolicy
    policy = dataset.options().experimental_distribute.auto_shard_policy
    if policy == policies.DATA:
        return True
    if policy != policies.AUTO:
        return False
    try:
        graph = compat.graph_of(dataset)
    except tf.errors.OpError:
        return False
    return not any(reader in op for reader in _READERS for op in compat.ops_in(graph))
