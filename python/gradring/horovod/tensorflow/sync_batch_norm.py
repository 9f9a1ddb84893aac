"""Batch normalisation over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from gradring.horovod import basics
from gradring.horovod.tensorflow.collectives import allreduce


class SyncBatchNormalization(tf.keras.layers.BatchNormalization):  # type: ignore[misc]
    """Keras' layer, whose mean and variance are those of all ranks' batches.

    All ranks have the same weight, so their batches must have the same size. The arguments are
    those of `keras.layers.BatchNormalization`.

    Examples:
        >>> layer = hvd.SyncBatchNormalization(momentum=0.0)
        >>> x = tf.constant([[0.0], [2.0]]) + 4.0 * hvd.rank()  # 0 and 2, and 4 and 6
        >>> normalized = layer(x, training=True)
        >>> layer.moving_mean.numpy().tolist(), layer.moving_variance.numpy().tolist()
        ([3.0], [5.0])
    """

    def _moments(self, *args: Any, **kwargs: Any) -> tuple[tf.Tensor, tf.Tensor]:
        mean, variance = super()._moments(*args, **kwargs)
        if basics.size() == 1:
            return mean, variance
        mean, square = tf.unstack(
            allreduce(tf.stack([mean, variance + mean**2]), name="batch normalization")
        )
        return mean, square - mean**2
