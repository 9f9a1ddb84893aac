"""Gathering and adding up rows, when ranks have different numbers of them."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from gradring.gradients.reduction import Collective
from gradring.tensorflow.dtypes import accumulator, as_native_bits
from gradring.tensorflow.start_wait import reduce, start_all_gather, wait


def row_counts(values: Sequence[tf.Tensor], collective: Collective) -> list[tf.Tensor]:
    """Every rank's number of rows of each value.

    Args:
        values: Tensors of at least one dimension.
        collective: The one that needs the numbers.

    Returns:
        For each value, int64 of shape `[world_size]`.
    """
    own = tf.stack([tf.shape(value, tf.int64)[0] for value in values])
    return list(tf.unstack(numbers_of_all(own, collective), len(values)))


def numbers_of_all(own: tf.Tensor, collective: Collective) -> tf.Tensor:
    """Every rank's vector of int64, as columns of shape `[length, world_size]`."""
    group = collective.communicator
    column = tf.one_hot(group.rank, group.world_size, dtype=tf.int64)
    (numbers,) = reduce([own[:, tf.newaxis] * column], collective.part("rows"))
    return numbers


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
            result.set_shape(tf.TensorShape([None]).concatenate(value.shape[1:]))
        results.append(result)
    return results


def add_rows(
    values: tf.Tensor, places: tf.Tensor, count: int | tf.Tensor, divisor: int = 1
) -> tf.Tensor:
    """The sums of rows with one place, added in order, divided, and rounded once.

    Args:
        values: Rows.
        places: Where each row belongs.
        count: How many places there are.
        divisor: Of the sums; those of integers are rounded towards zero.
    """
    wide = tf.cast(values, accumulator(values.dtype))
    sums = tf.math.unsorted_segment_sum(wide, places, count)
    if divisor > 1 and wide.dtype.is_integer:
        sums = tf.truncatediv(sums, tf.constant(divisor, wide.dtype))
    elif divisor > 1:
        sums *= tf.constant(1 / divisor, wide.dtype)
    return tf.cast(sums, values.dtype)
