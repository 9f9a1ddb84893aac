"""Horovod Elastic's interface to `gradring.elastic`.

Examples:
    >>> class Training(hvd.elastic.ObjectState):
    ...     def reset(self):
    ...         print("another group")
    >>> state = Training(step=0)
    >>> state.checkpoint_to("checkpoints")
    >>> state.register_reset_callbacks([lambda: print(hvd.size(), "ranks")])
    >>> state.sync()  # the newest commit of a rank, or of an earlier job
    >>> state.step = 10
    >>> state.commit()
    >>> state.step = 20
    >>> state.restore()
    >>> state.step
    10
    >>> state.save()  # a commit at which no process joins or leaves
    >>> state.check_host_updates()  # here they may, without a commit
    >>> state.flush()  # checkpoints are on the disk
    >>> state.on_reset()  # `run` calls it when the group has changed
    another group
    2 ranks
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

import gradring.elastic
import gradring.tensorflow.elastic
from gradring.elastic.job import Regroup
from gradring.errors import ConfigError, GradringError
from gradring.group.communicator import Communicator, open_groups
from gradring.horovod import basics
from gradring.horovod.tensorflow.optimizer import forget_sums

__all__ = [
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TensorFlowKerasState",
    "TensorFlowState",
    "run",
]
__dir__ = __all__.copy

HorovodInternalError = GradringError
"""The error of a failed collective. A function that catches it must raise it again, for `run`.

Examples:
    >>> hvd.elastic.HorovodInternalError.__name__
    'GradringError'
"""
HostsUpdatedInterrupt = Regroup
"""The notice that the group changes. A function that catches it must raise it again, for `run`.

Examples:
    >>> hvd.elastic.HostsUpdatedInterrupt.__name__
    'Regroup'
"""

_Train = TypeVar("_Train", bound=Callable[..., Any])


class State(gradring.tensorflow.elastic.State):
    """A state of variables and values that survives the loss of ranks.

    Examples:
        >>> model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
        >>> state = hvd.elastic.State(model, keras.optimizers.SGD(0.1), epoch=0)
        >>> state.sync()
        >>> state.epoch = 1
        >>> state.commit()
        >>> state.epoch = 2
        >>> state.restore()  # with the model's variables
        >>> state.epoch
        1
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **values: Any) -> None:
        """Takes variables and values, as the first commit.

        Args:
            model: As in `gradring.tensorflow.elastic.State`.
            optimizer: As in `gradring.tensorflow.elastic.State`.
            values: Values by name.
        """
        super().__init__(model, optimizer, **values)
        self._reset_callbacks: list[Callable[[], Any]] = []

    def _assign(self, values: Mapping[str, Any]) -> None:
        super()._assign(values)
        # A new rank has no accumulated gradients, and all ranks must update in the same step.
        forget_sums()

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Registers functions to call after a change of the group, before training continues.

        All ranks, including new ones, call them after restoring the last commit. So values that
        depend on the number of ranks, such as a learning rate, are equal everywhere, and the
        functions can call collectives.

        Args:
            callbacks: Functions without arguments, called in this order.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Calls `reset` and the registered functions after a change of the group."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def reset(self) -> None:
        """Does nothing; a subclass can override it to handle a change of the group."""

    def commit(self) -> None:
        """Saves all values, and lets processes join and leave; see `gradring.elastic.State`."""
        self.save()
        if self._after_commit is not None:
            self._after_commit(True)

    def save(self) -> None:
        """Copies all values in memory; every rank must call it after the same step."""
        after, self._after_commit = self._after_commit, None
        try:
            super().commit()
        finally:
            self._after_commit = after

    def check_host_updates(self) -> None:
        """Lets waiting processes join or leave without a commit.

        Every rank must call it after the same step, inside of `run`, since it is a collective of
        one byte. The current values are kept.
        """
        if self._after_commit is not None:
            try:
                self._after_commit(False)
            except HostsUpdatedInterrupt:
                self.save()
                raise

    def sync(self, communicator: Communicator | None = None) -> None:
        """Makes values equal on all ranks, as `gradring.elastic.State.sync` does.

        Args:
            communicator: The group; default: the group of `hvd.init()`.
        """
        super().sync(communicator or basics.communicator())


class ObjectState(State):
    """A state of values such as ``batch`` and ``epoch``.

    Examples:
        >>> state = hvd.elastic.ObjectState(batch=10 * hvd.rank(), epoch=0)
        >>> state.sync()  # all commits are the first: that of rank 0 wins
        >>> hvd.allgather_object(state.batch)
        [0, 0]
    """

    def __init__(self, bcast_object: object = None, get_rank: object = None, **kwargs: Any) -> None:
        """Takes the values as the first commit.

        Args:
            bcast_object: Has no effect: values are sent as in commits.
            get_rank: Has no effect.
            kwargs: Values by name.
        """
        super().__init__(**kwargs)


class TensorFlowKerasState(State):
    """A state of a model, its optimizer, and values such as ``batch`` and ``epoch``.

    Examples:
        >>> layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        >>> model = keras.Sequential([keras.layers.Input((1,)), layer])
        >>> state = hvd.elastic.TensorFlowKerasState(model, keras.optimizers.SGD(0.5), batch=0)
        >>> state.model.set_weights([np.full((1, 1), 7.0)])
        >>> state.restore()
        >>> state.model.get_weights()
        [array([[1.]], dtype=float32)]
        >>> float(state.optimizer.learning_rate)
        0.5
    """

    def __init__(
        self, model: Any, optimizer: Any = None, backend: None = None, **kwargs: Any
    ) -> None:
        """Takes the values as the first commit.

        Args:
            model: A built model of Keras.
            optimizer: The optimizer, if the model has none.
            backend: Must be None.
            kwargs: Values by name.
        """
        super().__init__(model, optimizer, **kwargs)
        self._model, self._optimizer = model, optimizer

    @property
    def model(self) -> Any:
        """The model."""
        return self._model

    @property
    def optimizer(self) -> Any:
        """The model's optimizer."""
        return self._optimizer or getattr(self._model, "optimizer", None)


class TensorFlowState(State):
    """A state of variables, and values such as ``batch`` and ``epoch``.

    Examples:
        >>> weights = tf.Variable(tf.fill([2], 1.0 + hvd.rank()))
        >>> state = hvd.elastic.TensorFlowState([weights], step=0)
        >>> state.sync()
        >>> hvd.allgather(weights).numpy()
        array([1., 1., 1., 1.], dtype=float32)
    """

    def __init__(self, variables: Iterable[Any] = (), session: None = None, **kwargs: Any) -> None:
        """Takes the values as the first commit.

        Args:
            variables: The variables.
            session: Must be None.
            kwargs: Values by name.
        """
        super().__init__(variables=variables, **kwargs)


def run(func: _Train) -> _Train:
    """Makes a function of a state continue when processes are lost, leave or join.

    See `gradring.elastic.run`, which can also limit the number of workers.

    Args:
        func: The function; its first argument is a `State`.

    Examples:
        >>> @hvd.elastic.run
        ... def train(state):
        ...     while state.step < 3:
        ...         state.total += float(hvd.allreduce(1.0, op=hvd.Sum))
        ...         state.step += 1
        ...         state.commit()
        ...     return state.total
        >>> train(hvd.elastic.ObjectState(step=0, total=0.0))
        6.0
    """

    @functools.wraps(func)
    def run_elastically(state: State, *args: Any, **kwargs: Any) -> Any:
        if isinstance(state, State) and type(state).sync is not State.sync:
            raise ConfigError(
                f"elastic.run: {type(state).__name__} overrides sync(), which would not be called; "
                "give State the values that must be equal, or set them in reset()"
            )
        communicator = basics.communicator()
        joins, first = bool(open_groups.yet_to_join(communicator)), communicator.generation + 1

        @gradring.elastic.run(communicator)
        @functools.wraps(func)
        def train(state: State, *args: Any, **kwargs: Any) -> Any:
            if isinstance(state, State) and (joins or communicator.generation > first):
                state.on_reset()
            return func(state, *args, **kwargs)

        return train(state, *args, **kwargs)

    return cast(_Train, run_elastically)
