"""Gradient reduction without a strategy."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from gradring.communicator import Communicator
from gradring.gradients import buckets, checks
from gradring.gradients.names import Names
from gradring.gradients.reduction import Reduction
from gradring.tensorflow.ops import current_communicator
from gradring.tensorflow.reduction import reduce_leaves
from gradring.tensorflow.start_wait import eager_step


class GradientReducer:
    """Averages gradients over all ranks, eagerly and inside a `tf.function`.

    ```python
    reduce_gradients = GradientReducer()
    broadcast_variables(model.variables)

    @tf.function
    def train_step(images, labels):
        with tf.GradientTape() as tape:
            loss = loss_of(model(images, training=True), labels)
        weights = model.trainable_variables
        gradients = tape.gradient(loss, weights)
        optimizer.apply_gradients(zip(reduce_gradients(gradients, weights), weights))
    ```
    """

    def __init__(
        self,
        op: str = "mean",
        bucket_bytes: int = buckets.DEFAULT_BUCKET_BYTES,
        communicator: Communicator | None = None,
        *,
        check_gradients: str | None = None,
    ) -> None:
        """Makes a reducer; nothing is sent yet.

        Args:
            op: "mean" (default) for losses averaged over each rank's own batch, or any other op of
                `all_reduce`.
            bucket_bytes: Bound on the gradients that travel together, in bytes; default 16 MiB.
            communicator: As for `all_reduce`.
            check_gradients: "warn", "raise" or None, as for `CustomCollectiveStrategy`.

        Raises:
            gradring.errors.ConfigError: `check_gradients` is something else, or `bucket_bytes` not
                above 0.
        """
        buckets.check(bucket_bytes)
        checks.check(check_gradients)
        self._check_gradients = check_gradients
        self._op = op
        self._bucket_bytes = bucket_bytes
        self._communicator = communicator

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def __call__(
        self,
        gradients: Sequence[tf.Tensor | tf.IndexedSlices | None],
        variables: Sequence[tf.Variable | str] | None = None,
    ) -> list[tf.Tensor | tf.IndexedSlices | None]:
        """Reduces the gradients of one step, as `gradring.Communicator.step` has it.

        Args:
            gradients: In the order of their variables, the same on every rank. None stays None and
                must be None on every rank. `tf.IndexedSlices` as in `all_reduce`.
            variables: What these are the gradients of, or names, as many as gradients: shown in
                messages and compared between ranks.

        Returns:
            The reduced gradients, in the same order.

        Raises what `all_reduce` raises.
        """
        gradients = list(gradients)
        if variables is not None and len(variables) != len(gradients):
            raise ValueError(f"{len(variables)} variables cannot have {len(gradients)} gradients")
        present = [i for i, gradient in enumerate(gradients) if gradient is not None]
        leaves = [gradients[i] for i in present]
        named = None if variables is None else [variables[i] for i in present]
        names = Names.of_variables("gradients", leaves, named)
        reduction = Reduction(
            self._communicator or current_communicator(),
            names,
            self._op,
            self._bucket_bytes,
            self._check_gradients,
        )
        with eager_step(reduction.communicator):
            reduced = reduce_leaves(leaves, reduction)
        for index, gradient in zip(present, reduced, strict=True):
            gradients[index] = gradient
        return gradients
