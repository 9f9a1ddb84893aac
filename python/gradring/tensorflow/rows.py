"""Gathering along the first dimension, when ranks have different numbers of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from gradring.communicator import Communicator
from gradring.gradients.checks import NO_CHECK, Check
from gradring.gradients.names import Label
from gradring.tensorflow.dtypes import as_native_bits
from gradring.tensorflow.start_wait import start, start_all_gather, wait


def row_counts(values: Sequence[Any], communicator: Communicator, label: Label) -> list[Any]:
    """Every rank's number of rows of each value.

    Args:
      values: tensors of at least one dimension.
      communicator: a `gradring.Communicator`.
      label: what the gathering is called.

    Returns:
      For each value, int64 of shape `[world_size]`.
    """
    own = tf.stack([tf.shape(value, tf.int64)[0] for value in values])
    place = tf.one_hot(communicator.rank, communicator.world_size, dtype=tf.int64)
    started = start(
        [own[:, tf.newaxis] * place],
        communicator,
        label.part("rows"),
        collective="all_reduce",
        reduce_op="sum",
    )
    return list(tf.unstack(wait([started])[0][0], len(values)))


def gather_rows(
    values: Sequence[Any],
    counts: Any,
    communicator: Communicator,
    labels: Sequence[Label],
    check: Check = NO_CHECK,
) -> list[Any]:
    """Concatenates every rank's rows, in rank order.

    Args:
      values: tensors with the same number of rows as each other.
      counts: that number on every rank, int64 of shape `[world_size]`.
      communicator: a `gradring.Communicator`.
      labels: what gathering each value is called.
      check: what to do if the first value is not finite.

    Returns:
      For each value, a tensor of shape `[sum of counts, ...]`.
    """
    encoded = [
        as_native_bits(value, label.shown) for value, label in zip(values, labels, strict=True)
    ]
    started = [
        start_all_gather(native, counts, communicator, label, NO_CHECK if number else check)
        for number, ((native, _), label) in enumerate(zip(encoded, labels, strict=True))
    ]
    results = []
    for value, (_, decode), (gathered,) in zip(values, encoded, wait(started), strict=True):
        result = decode(gathered)
        if not tf.executing_eagerly():
            result.set_shape([None, *value.shape[1:]])
        results.append(result)
    return results
