"""Horovod's callbacks for `fit` of Keras 3, or of `tf_keras` if TensorFlow uses it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from gradring.horovod import basics
from gradring.horovod.process_sets import communicator_of, global_process_set
from gradring.horovod.tensorflow.collectives import allreduce, broadcast_variables
from gradring.horovod.tensorflow.gradients import LocalVariables
from gradring.tensorflow.graph.model_variables import build, optimizer_variables, variables_of
from gradring.tensorflow.graph.own_draws import note_shared
from gradring.tensorflow.rules.updates import updates_of

__all__ = [
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]
__dir__ = __all__.copy


class BroadcastGlobalVariablesCallback(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """A callback that gives every rank the root's model and optimizer after the first batch.

    If the optimizer has `update=Sharded()`, it does so before the first batch.

    Examples:
        >>> own = keras.layers.Dense(1, use_bias=False)
        >>> model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1), own])
        >>> model.compile("sgd", "mse")
        >>> callback = hvd.callbacks.BroadcastGlobalVariablesCallback(root_rank=0)
        >>> callback.register_local_var(own.kernel)
        >>> x = np.random.rand(8, 1)
        >>> history = model.fit(x, x, verbose=0, callbacks=[callback])
        >>> kernel, other = hvd.allgather_object(model.get_weights()[0])
        >>> np.array_equal(kernel, other)
        True
    """

    def __init__(
        self, root_rank: int, device: str = "", local_variables: Iterable[Any] | None = None
    ) -> None:
        """Takes the root and the excluded variables.

        Args:
            root_rank: The root.
            device: Has no effect: tensors are on CPUs.
            local_variables: Variables that are not broadcast.
        """
        super().__init__()
        self._root_rank = root_rank
        is_one = hasattr(local_variables, "assign")
        self._local = LocalVariables([local_variables] if is_one else local_variables or ())
        self._is_done = False

    def register_local_var(self, var: Any) -> None:
        """Excludes a variable from the broadcast.

        Args:
            var: The variable.
        """
        self._local.add(var)

    def on_train_begin(self, logs: Any = None) -> None:
        """Makes the next batch broadcast again, for new ranks of an elastic job."""
        self._is_done = False
        # The first step is traced before the broadcast, and must know of it.
        own = [variable for variable in self.model.variables if variable not in self._local]
        note_shared(own, communicator_of(global_process_set))
        optimizer = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
        # A step would mix the parts of weights that differ between the ranks.
        if updates_of(None, optimizer).holds_parts and _is_built(self.model):
            build(self.model.optimizer, self.model)
            self._broadcast(variables_of(self.model))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcasts after the first batch, when the optimizer has its variables too."""
        if not self._is_done:
            self._broadcast([*self.model.variables, *optimizer_variables(self.model.optimizer)])

    def _broadcast(self, variables: Iterable[Any]) -> None:
        once = {id(variable): variable for variable in variables if variable not in self._local}
        broadcast_variables(list(once.values()), self._root_rank)
        self._is_done = True


def _is_built(model: Any) -> bool:
    return bool(model.built) and all(layer.built for layer in model.layers)


class MetricAverageCallback(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """A callback that averages the logs of an epoch over all ranks, for later callbacks.

    Examples:
        >>> layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        >>> model = keras.Sequential([keras.layers.Input((1,)), layer])
        >>> model.compile(keras.optimizers.SGD(0.0), "mae")
        >>> x = np.full((4, 1), 2.0 * hvd.rank())  # a loss of 0 and of 2
        >>> callbacks = [hvd.callbacks.MetricAverageCallback()]
        >>> model.fit(x, x, verbose=0, callbacks=callbacks).history
        {'loss': [1.0]}
    """

    def __init__(self, device: str = "") -> None:
        """Makes the callback.

        Args:
            device: Has no effect: tensors are on CPUs.
        """
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replaces this rank's logs by the averages."""
        if logs:
            names = sorted(logs)
            own = tf.constant([float(logs[name]) for name in names], tf.float64)
            means = allreduce(own, name=f"metrics {', '.join(names)}").numpy()
            logs.update(zip(names, means.tolist(), strict=True))


class LearningRateScheduleCallback(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """A callback that sets the learning rate to ``initial_lr * multiplier`` in some epochs.

    Examples:
        >>> schedule = hvd.callbacks.LearningRateScheduleCallback(0.5, 0.5, start_epoch=2)
        >>> [schedule.multiplier(epoch) for epoch in (2, 3)]
        [1.0, 0.5]
        >>> model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile(keras.optimizers.SGD(1.0), "mse")
        >>> x = np.ones((4, 1))
        >>> model.fit(x, x, epochs=4, verbose=0, callbacks=[schedule]).history["lr"]
        [1.0, 1.0, 0.5, 0.25]
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        """Takes the schedule.

        Args:
            initial_lr: The learning rate at the start.
            multiplier: A function of the epoch; or a number, which is raised to the power of the
                epochs since `start_epoch`.
            start_epoch: First epoch of the schedule.
            end_epoch: First epoch after the schedule; default: no end.
            staircase: True to change the rate with each epoch; False changes it with each batch,
                and the function gets fractions of an epoch.
            momentum_correction: Horovod scales the momentum with the learning rate. Keras 3 and
                `tf_keras` treat the momentum as a constant, so here True only gives a warning.
            steps_per_epoch: Number of steps of an epoch; default: the number in `fit`.

        Raises:
            ValueError: `initial_lr` is None.
        """
        super().__init__()
        if initial_lr is None:
            raise ValueError("initial_lr is missing; give the learning rate at the start")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self._multiplier = multiplier
        self._epoch = 0

    def multiplier(self, epoch: float) -> float:
        """Returns the factor of `initial_lr` in an epoch.

        Args:
            epoch: The epoch, from 0; a fraction if the schedule has no staircase.
        """
        if callable(self._multiplier):
            return self._multiplier(epoch)
        return float(self._multiplier ** (epoch - self.start_epoch))

    def on_train_begin(self, logs: Any = None) -> None:
        """Determines the number of steps of an epoch.

        Raises:
            ValueError: `fit` does not know the number.
        """
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ValueError(f"{type(self).__name__}: give steps_per_epoch=")
        momentum = getattr(self.model.optimizer, "momentum", None)
        if self.momentum_correction and momentum:
            warnings.warn(
                f"{type(self).__name__}: Keras takes momentum={momentum} for a constant, so it is "
                "not corrected; pass momentum_correction=False",
                stacklevel=2,
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Records the epoch."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Sets the learning rate, if the schedule covers this batch."""
        ended = self.end_epoch is not None and self._epoch >= self.end_epoch
        if self._epoch < self.start_epoch or ended or (self.staircase and batch > 0):
            return
        fraction = 0.0 if self.staircase else batch / (self.steps_per_epoch or 1)
        rate = self.initial_lr * self.multiplier(self._epoch + fraction)
        self.model.optimizer.learning_rate = rate

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the learning rate to the logs."""
        if logs is not None:
            logs["lr"] = self._rate()

    def _rate(self) -> float:
        return float(np.asarray(tf.convert_to_tensor(self.model.optimizer.learning_rate)))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """A callback that raises the learning rate from ``initial_lr / hvd.size()`` to ``initial_lr``.

    P. Goyal et al., Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour (2017).

    Examples:
        >>> model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)), "mse")
        >>> warmup = hvd.callbacks.LearningRateWarmupCallback(1.0, warmup_epochs=2)
        >>> x = np.ones((4, 1))
        >>> model.fit(x, x, epochs=3, verbose=0, callbacks=[warmup]).history["lr"]
        [0.75, 1.0, 1.0]
        >>> warmup.multiplier(0)  # in an epoch of one batch
        0.75
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        """Takes the length of the warm-up.

        Args:
            initial_lr: The learning rate at the end.
            warmup_epochs: Length of the warm-up in epochs.
            momentum_correction: As in `LearningRateScheduleCallback`.
            steps_per_epoch: As in `LearningRateScheduleCallback`.
            verbose: 1 to print a line on rank 0 at the end.
        """

        def multiplier(epoch: float) -> float:
            # The last batch of an epoch counts as the whole epoch.
            done = (epoch + 1 / (self.steps_per_epoch or 1)) / warmup_epochs
            return (1 + done * (basics.size() - 1)) / basics.size()

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self._verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the learning rate to the logs, and prints a line after the last epoch."""
        super().on_epoch_end(epoch, logs)
        if self._verbose and self.end_epoch == epoch + 1 and basics.rank() == 0:
            print(f"\nEpoch {epoch + 1}: the learning rate is warm, {self._rate():g}.")
