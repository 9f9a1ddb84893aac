"""Horovod Elastic for Keras: the state of a model, and callbacks that commit it during `fit`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from gradring.horovod.tensorflow.elastic import State, TensorFlowKerasState, run

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]
__dir__ = __all__.copy


class KerasState(TensorFlowKerasState):
    """A state of a model, its optimizer, and values such as ``batch`` and ``epoch``.

    Examples:
        >>> layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        >>> model = keras.Sequential([keras.layers.Input((1,)), layer])
        >>> model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.5)), "mse")
        >>> state = hvd.elastic.KerasState(model, batch=0, epoch=0)
        >>> state.sync()
        >>> x, commits = np.ones((4, 1)), [hvd.elastic.CommitStateCallback(state)]
        >>> history = model.fit(x, 3 * x, verbose=0, callbacks=commits)
        >>> model.set_weights([np.zeros((1, 1))])
        >>> state.restore()
        >>> state.model.get_weights(), float(state.optimizer.learning_rate)
        ([array([[3.]], dtype=float32)], 0.5)
    """


class CommitStateCallback(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """A callback that commits a state every few batches and at the end of every epoch.

    Examples:
        >>> model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        >>> state = hvd.elastic.KerasState(model, commits=0)
        >>> class Counting(hvd.elastic.CommitStateCallback):
        ...     def commit(self):
        ...         self.state.commits += 1
        ...         super().commit()
        >>> callbacks = [Counting(state, batches_per_commit=2)]
        >>> x = np.ones((8, 1))
        >>> history = model.fit(x, x, batch_size=2, verbose=0, callbacks=callbacks)  # four batches
        >>> state.commits  # two of batches, one of the epoch
        3
    """

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        """Takes the state and the interval.

        Args:
            state: The state to commit, on every rank.
            batches_per_commit: Number of batches between two commits.
        """
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self._since = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Resets the count of batches."""
        self._since = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commits after every `batches_per_commit` batches."""
        self._since += 1
        if self._since >= self.batches_per_commit:
            self._since = 0
            self.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commits at the end of an epoch."""
        self._since = 0
        self.commit()

    def commit(self) -> None:
        """Commits now; a subclass can override it."""
        self.state.commit()


class UpdateBatchStateCallback(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """A callback that keeps the index of the next batch in ``state.batch``.

    Examples:
        >>> model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        >>> state = hvd.elastic.KerasState(model, batch=0)
        >>> update = hvd.elastic.UpdateBatchStateCallback(state)
        >>> show = keras.callbacks.LambdaCallback(
        ...     on_train_batch_end=lambda batch, logs: print(state.batch)
        ... )
        >>> x = np.ones((6, 1))
        >>> history = model.fit(x, x, batch_size=2, verbose=0, callbacks=[update, show])
        1
        2
        3
        >>> state.batch
        0
    """

    def __init__(self, state: State) -> None:
        """Takes the state.

        Args:
            state: A state with a value `batch`.
        """
        super().__init__()
        self._state = state
        self._before = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Records the start: if training resumes inside an epoch, `fit` counts from 0 again."""
        self._before = self._state.batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Stores the index of the next batch."""
        self._state.batch = self._before + batch + 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Resets the index for the next epoch."""
        self._state.batch = 0


class UpdateEpochStateCallback(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """A callback that keeps the number of finished epochs in ``state.epoch``.

    Examples:
        >>> model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        >>> state = hvd.elastic.KerasState(model, epoch=3)  # three are done
        >>> callbacks = [hvd.elastic.UpdateEpochStateCallback(state)]
        >>> x = np.ones((4, 1))
        >>> history = model.fit(x, x, epochs=5 - state.epoch, verbose=0, callbacks=callbacks)
        >>> state.epoch
        5
    """

    def __init__(self, state: State) -> None:
        """Takes the state.

        Args:
            state: A state with a value `epoch`.
        """
        super().__init__()
        self._state = state
        self._before = 0
        self._first: int | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Records the start: `fit` can count its epochs from 0 or from `initial_epoch`."""
        self._before, self._first = self._state.epoch, None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Records the number of the first epoch of `fit`."""
        self._first = epoch if self._first is None else self._first

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Stores the number of finished epochs."""
        first = 0 if self._first is None else self._first
        self._state.epoch = self._before + epoch + 1 - first
