"""Batch normalisation over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from gradring.horovod import basics
from gradring.horovod.tensorflow.collectives import allreduce


class SyncBatchNormalization(tf.keras.layers.BatchNormalization):  # type: ignore[misc]
    """Keras' layer, whose mean and variance are those of all ranks' batches.

    All ranks count alike, so their batches must have the same size.
    """

    def _moments(self, *args: Any, **kwargs: Any) -> tuple[tf.Tensor, tf.Tensor]:
        mean, variance = super()._moments(*args, **kwargs)
        if basics.size() == 1:
            return mean, variance
        mean, square = tf.unstack(
            allreduce(tf.stack([mean, variance + mean**2]), name="batch normalization")
        )
        return mean, square - mean**2
