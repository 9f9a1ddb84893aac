"""Gathering along the first dimension, when ranks have different numbers of rows."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from gradring.gradients.reduction import Collective
from gradring.tensorflow.dtypes import as_native_bits
from gradring.tensorflow.start_wait import reduce, start_all_gather, wait


def row_counts(values: Sequence[tf.Tensor], collective: Collective) -> list[tf.Tensor]:
    """Every rank's number of rows of each value.

    Args:
        values: Tensors of at least one dimension.
        collective: The one that needs the numbers.

    Returns:
        For each value, int64 of shape `[world_size]`.
    """
    group = collective.communicator
    own = tf.stack([tf.shape(value, tf.int64)[0] for value in values])
    column = tf.one_hot(group.rank, group.world_size, dtype=tf.int64)
    (counts,) = reduce([own[:, tf.newaxis] * column], collective.part("rows"))
    return list(tf.unstack(counts, len(values)))


def gather_rows(
    values: Sequence[tf.Tensor], counts: tf.Tensor, collectives: Sequence[Collective]
) -> list[tf.Tensor]:
    """Concatenates every rank's rows, in rank order.

    Args:
        values: Tensors with the same number of rows as each other, of any dtypes of fixed width.
        counts: That number on every rank, int64 of shape `[world_size]`.
        collectives: One for each value.

    Returns:
        For each value, a tensor of shape `[sum of counts, ...]` and the same dtype.

    Raises:
        TypeError: A dtype has no fixed width.
    """
    encoded = [
        as_native_bits(value, collective.label.shown)
        for value, collective in zip(values, collectives, strict=True)
    ]
    started = [
        start_all_gather(native, counts, collective)
        for (native, _), collective in zip(encoded, collectives, strict=True)
    ]
    results = []
    for value, (_, decode), (gathered,) in zip(values, encoded, wait(started), strict=True):
        result = decode(gathered)
        if not tf.executing_eagerly():
            result.set_shape([None, *value.shape[1:]])
        results.append(result)
    return results
