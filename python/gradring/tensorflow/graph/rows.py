"""Gathering, exchanging and adding up rows when ranks have different numbers of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from gradring.gradients.reduction import Collective
from gradring.tensorflow.graph.dtypes import accumulator, as_native_bits, with_dtype
from gradring.tensorflow.graph.start_wait import (
    reduce,
    start_all_gather,
    start_all_to_all,
    start_all_to_all_v,
    wait,
)


def row_counts(values: Sequence[tf.Tensor], collective: Collective) -> list[tf.Tensor]:
    """Exchanges the numbers of rows of each value.

    Args:
        values: Tensors of at least one dimension.
        collective: The collective that needs the numbers.

    Returns:
        For each value, int64 of shape `[world_size]`.
    """
    own = tf.stack([tf.shape(value, tf.int64)[0] for value in values])
    return list(tf.unstack(numbers_of_all(own, collective.part("rows")), len(values)))


def numbers_of_all(own: tf.Tensor, collective: Collective) -> tf.Tensor:
    """Gathers every rank's vector of int64, as columns of shape `[length, world_size]`."""
    group = collective.communicator
    column = tf.one_hot(group.rank, group.world_size, dtype=tf.int64)
    (numbers,) = reduce([own[:, tf.newaxis] * column], collective)
    return numbers


def gather_rows(
    values: Sequence[tf.Tensor], counts: Sequence[tf.Tensor], collectives: Sequence[Collective]
) -> list[tf.Tensor]:
    """Concatenates every rank's rows, in rank order.

    Args:
        values: Tensors of at least one dimension, of any dtypes of fixed width.
        counts: For each value, the number of its rows on every rank, int64 of shape `[world_size]`.
        collectives: Label and group for each value.

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
        start_all_gather(native, rows, with_dtype(collective, value))
        for value, rows, (native, _), collective in zip(
            values, counts, encoded, collectives, strict=True
        )
    ]
    results = []
    for value, (_, decode), (gathered,) in zip(values, encoded, wait(started), strict=True):
        result = decode(gathered)
        if not tf.executing_eagerly():
            result.set_shape(tf.TensorShape([None]).concatenate(value.shape[1:]))
        results.append(result)
    return results


class SplitsError(tf.errors.InvalidArgumentError, ValueError):  # type: ignore[misc]
    """Splits that do not divide the rows: a `ValueError` and an error of TensorFlow.

    Its constructor is TensorFlow's, because AutoGraph makes the exception anew with a longer
    message.
    """


def exchange_rows(
    value: tf.Tensor, sent: tf.Tensor, collective: Collective
) -> tuple[tf.Tensor, tf.Tensor]:
    """Sends rows to every rank, after an exchange of their numbers.

    Args:
        value: A tensor of at least one dimension, and any dtype of fixed width.
        sent: Number of rows for each rank, from `checked_splits`.
        collective: Label and group of the exchange.

    Returns:
        The rows from all ranks, in rank order, and the number of rows from each rank, as int64.

    Raises:
        TypeError: The dtype has no fixed width.
    """
    native, decode = as_native_bits(value, collective.label.shown)
    ((_, received),) = wait([start_all_to_all(sent, collective.part("splits"))])
    exchange = with_dtype(collective, value)
    ((rows,),) = wait([start_all_to_all_v(native, sent, received, exchange)])
    result = decode(rows)
    if not tf.executing_eagerly() and value.shape.rank is not None:
        result.set_shape([None, *value.shape[1:]])
    return result, received


def checked_splits(splits: Any, value: tf.Tensor, ranks: int, label: str) -> tf.Tensor:
    """Checks a program's splits, and returns them as int64 of shape `[ranks]`.

    Args:
        splits: Number of rows for each rank, as the program passed it.
        value: The tensor whose rows are split.
        ranks: The world size.
        label: Name of the collective, for messages.

    Raises:
        SplitsError: The splits do not divide the rows. If their values are known only when a graph
            runs, the graph checks them and raises `tf.errors.InvalidArgumentError`.
        TypeError: The splits are no integers.
    """
    splits = tf.convert_to_tensor(splits)
    if not splits.dtype.is_integer:
        raise TypeError(f"{label}: splits are of {splits.dtype.name}; give integers")
    rows = value.shape[0] if value.shape.rank else None
    known = tf.get_static_value(splits)
    problem = _problem(splits, known, rows, ranks)
    if problem is not None:
        raise SplitsError(None, None, f"{label}: {problem}")
    counts = tf.ensure_shape(tf.cast(splits, tf.int64), [ranks])
    if known is not None and rows is not None:
        return counts
    checks = [
        tf.debugging.assert_non_negative(counts, f"{label}: a split is negative"),
        tf.debugging.assert_equal(
            tf.reduce_sum(counts),
            tf.shape(value, tf.int64)[0],
            f"{label}: the splits do not add up to the number of rows",
        ),
    ]
    with tf.control_dependencies([check for check in checks if check is not None]):
        return tf.identity(counts)


def _problem(splits: tf.Tensor, known: Any, rows: int | None, ranks: int) -> str | None:
    """Returns an error text for wrong splits, as far as values and rows are known; else None."""
    if not splits.shape.is_compatible_with([ranks]):
        return f"splits have shape {splits.shape}; give one for each of {ranks} ranks"
    if known is None:
        return None
    given = known.tolist()
    if min(given) < 0:
        return f"splits={given} would give a rank less than no rows; give each at least 0"
    if rows not in (None, sum(given)):
        return f"splits={given} do not add up to the number of rows, {rows}"
    return None


def divided(values: tf.Tensor, divisor: int) -> tf.Tensor:
    """Divides the values and rounds them once; integers are rounded towards zero."""
    if divisor == 1:
        return values
    wide = tf.cast(values, accumulator(values.dtype))
    divide = tf.truncatediv if wide.dtype.is_integer else tf.divide
    return tf.cast(divide(wide, tf.constant(divisor, wide.dtype)), values.dtype)


def add_rows(
    values: tf.Tensor, places: tf.Tensor, count: int | tf.Tensor, divisor: int = 1
) -> tf.Tensor:
    """Adds up the rows of each place in order; divides and rounds each sum once.

    Args:
        values: Rows.
        places: Place of each row, from 0 to `count - 1`.
        count: Number of places.
        divisor: Divisor of the sums; quotients of integers are rounded towards zero.
    """
    wide = tf.cast(values, accumulator(values.dtype))
    sums = tf.math.unsorted_segment_sum(wide, places, count)
    if divisor > 1 and wide.dtype.is_integer:
        sums = tf.truncatediv(sums, tf.constant(divisor, wide.dtype))
    elif divisor > 1:
        sums *= tf.constant(1 / divisor, wide.dtype)
    return tf.cast(sums, values.dtype)
