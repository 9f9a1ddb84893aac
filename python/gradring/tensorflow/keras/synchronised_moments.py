"""Moments over the batches of all replicas, for synchronised batch normalisation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from gradring.tensorflow.seams import keras_names


def moments(
    original: Callable[..., tuple[tf.Tensor, tf.Tensor]],
    x: tf.Tensor,
    axes: Sequence[int],
    keepdims: bool,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Stands in for Keras' function, which runs three collectives instead of one.

    Args:
        original: Keras' function, which is not called.
        x: This replica's batch, floating.
        axes: Dimensions to reduce.
        keepdims: True keeps the reduced dimensions, with size 1.

    Returns:
        Mean and variance over the batches of all replicas; 0 if all batches are empty.
    """
    return _moments(x, None, axes, keepdims)


def moments_of_layer(
    original: Callable[..., tuple[tf.Tensor, tf.Tensor]], layer: Any, inputs: tf.Tensor, mask: Any
) -> tuple[tf.Tensor, tf.Tensor]:
    """Stands in for the moments of `BatchNormalization`; Keras computes masked ones per replica."""
    if mask is None or not layer.synchronized:
        return original(layer, inputs, mask)
    is_valid = tf.broadcast_to(tf.cast(mask, tf.bool)[..., tf.newaxis], tf.shape(inputs))
    return _moments(inputs, is_valid, keras_names.REDUCTION_AXES.of(layer), False)


def _moments(
    x: tf.Tensor, is_valid: tf.Tensor | None, axes: Sequence[int], keepdims: bool
) -> tuple[tf.Tensor, tf.Tensor]:
    if is_valid is not None:
        x = tf.where(is_valid, x, tf.zeros_like(x))
    own = [tf.reduce_sum(each, axes, keepdims=True) for each in (x, tf.square(x))]
    if is_valid is None:
        count = tf.cast(tf.size(x) / tf.size(own[0]), x.dtype)
    else:
        count = tf.reduce_sum(tf.cast(is_valid, x.dtype), axes, keepdims=True)
    context = tf.distribute.get_replica_context()
    *sums, count = context.all_reduce(tf.distribute.ReduceOp.SUM, [*own, count])
    mean, square = (tf.math.divide_no_nan(total, count) for total in sums)
    variance = tf.maximum(square - tf.square(mean), 0.0)
    if keepdims:
        return mean, variance
    return tf.squeeze(mean, axes), tf.squeeze(variance, axes)
