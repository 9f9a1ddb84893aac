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


class KerasState(TensorFlowKerasState):
    """A model, its optimizer, and values such as ``batch`` and ``epoch``.

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
    """Commits a state every few batches, and at the end of every epoch.

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
        """Says what, and how often.

        Args:
            state: What to commit, on every rank.
            batches_per_commit: How many batches are between two commits.
        """
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self._since = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Counts from here."""
        self._since = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commits, when it is time."""
        self._since += 1
        if self._since >= self.batches_per_commit:
            self._since = 0
            self.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commits."""
        self._since = 0
        self.commit()

    def commit(self) -> None:
        """Commits now; a subclass may do more."""
        self.state.commit()


class UpdateBatchStateCallback(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Notes in ``state.batch`` which batch of an epoch comes next.

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
        """Says where.

        Args:
            state: It has a value `batch`.
        """
        super().__init__()
        self._state = state
        self._before = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """In the middle of an epoch, `fit` begins its count anew."""
        self._before = self._state.batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """One batch more."""
        self._state.batch = self._before + batch + 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """The next epoch begins with its first batch."""
        self._state.batch = 0


class UpdateEpochStateCallback(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Notes in ``state.epoch`` how many epochs have ended.

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
        """Says where.

        Args:
            state: It has a value `epoch`.
        """
        super().__init__()
        self._state = state
        self._before = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """`fit` may count its epochs from 0."""
        self._before = self._state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """One epoch more."""
        first = self.params.get("initial_epoch", 0)
        self._state.epoch = self._before + epoch + 1 - first
