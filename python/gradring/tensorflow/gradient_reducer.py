"""Gradient reduction without a strategy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from gradring.communicator import Communicator
from gradring.tensorflow import bucketing
from gradring.tensorflow.ops import all_reduce


class GradientReducer:
    """Averages gradients over all ranks, eagerly and inside a `tf.function`.

    ```python
    reduce_gradients = GradientReducer()
    broadcast_variables(model.variables)

    @tf.function
    def train_step(images, labels):
        with tf.GradientTape() as tape:
            loss = loss_of(model(images, training=True), labels)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(reduce_gradients(gradients), model.trainable_variables))
    ```
    """

    def __init__(
        self,
        op: str = "mean",
        bucket_bytes: int = bucketing.DEFAULT_BUCKET_BYTES,
        communicator: Communicator | None = None,
    ) -> None:
        """Makes a reducer; nothing is sent yet.

        Args:
          op: "mean" (default) for losses averaged over each rank's own batch, or any other op of
            `all_reduce`.
          bucket_bytes: bound on the gradients that travel together, in bytes; default 16 MiB.
          communicator: as for `all_reduce`.
        """
        self._op = op
        self._bucket_bytes = bucket_bytes
        self._communicator = communicator

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def __call__(self, gradients: Sequence[Any]) -> list[Any]:
        """Reduces the gradients of one step.

        Args:
          gradients: in the order of their variables, the same on every rank. None stays None and
            must be None on every rank. Of `tf.IndexedSlices`, the rows of all ranks are gathered;
            they are never made dense.

        Returns:
          The reduced gradients, in the same order.

        Raises:
          As `all_reduce`.
        """
        gradients = list(gradients)
        present = [i for i, gradient in enumerate(gradients) if gradient is not None]
        reduced = all_reduce(
            [gradients[i] for i in present],
            self._op,
            "gradients",
            self._communicator,
            bucket_bytes=self._bucket_bytes,
        )
        for index, gradient in zip(present, reduced, strict=True):
            gradients[index] = gradient
        return gradients
