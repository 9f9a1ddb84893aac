"""Comparison of batch sizes: the ranks divide a global batch, so its size must be equal on all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from gradring.errors import ConfigError
from gradring.group.communicator import Communicator
from gradring.group.require_equal import require_equal
from gradring.tensorflow.graph import compat
from gradring.tensorflow.graph.fallback import falls_back

_REMEDY = (
    "the batch size is that of all ranks together: give every rank the same; for separate batches "
    "on each rank, use strategy.distribute_datasets_from_function or AutoShardPolicy.OFF"
)


def check(dataset: tf.data.Dataset, communicator: Communicator) -> None:
    """Compares the batch sizes; every rank that distributes the dataset must call it.

    Nothing is compared if any rank does not know its size.

    Args:
        dataset: A `tf.data.Dataset` of global batches.
        communicator: A `gradring.Communicator`.

    Raises:
        gradring.errors.MismatchError: The sizes differ; the message names two of them.
    """
    policy = dataset.options().experimental_distribute.auto_shard_policy
    is_undivided = policy == tf.data.experimental.AutoShardPolicy.OFF
    if communicator.world_size == 1 or is_undivided or not tf.executing_eagerly():
        return
    size = _size_of(dataset)
    own = None if size is None else {"batch_size": str(size)}
    require_equal(communicator, own, of="experimental_distribute_dataset", remedy=_REMEDY)


@contextlib.contextmanager
def names_scalars(dataset: tf.data.Dataset, communicator: Communicator) -> Iterator[None]:
    """Names parts of elements that have no batch dimension, if TensorFlow fails in the block.

    Raises:
        gradring.errors.ConfigError: TensorFlow could not divide an element with such a part.
        IndexError: TensorFlow failed for another reason.
    """
    try:
        yield
    except IndexError as error:
        specs = tf.nest.flatten(dataset.element_spec)
        ranks = [spec.shape.rank if isinstance(spec, tf.TensorSpec) else None for spec in specs]
        if 0 not in ranks:
            raise
        rank, host = communicator.rank, communicator.host
        raise ConfigError(
            f"rank {rank} of {host} cannot divide the batches of a dataset: tensor "
            f"{ranks.index(0) + 1} of {len(ranks)} in its elements is a scalar; repeat it for each "
            "sample, or divide the data yourself by strategy.distribute_datasets_from_function",
            rank=rank,
            host=host,
        ) from error


@falls_back("the comparison of batch sizes", "each rank divides its own batches")
def _size_of(dataset: tf.data.Dataset) -> int | None:
    """Returns the batch size that `tf.distribute` divides, or None if it is unknown in advance."""
    size = int(tf.raw_ops.ComputeBatchSize(input_dataset=compat.variant_of(dataset)))
    return None if size < 0 else size
