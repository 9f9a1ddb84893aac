"""Horovod Elastic's names for `gradring.elastic`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

import gradring.elastic
import gradring.tensorflow.elastic
from gradring.elastic.run import Regroup
from gradring.errors import ConfigError, GradringError
from gradring.group.communicator import Communicator, open_groups
from gradring.horovod import basics
from gradring.horovod.tensorflow.optimizer import forget_sums

#: What a function of the state may catch, and raises again: a collective that has failed, and
#: processes that join or leave. `run` does what follows.
HorovodInternalError = GradringError
HostsUpdatedInterrupt = Regroup

_Train = TypeVar("_Train", bound=Callable[..., Any])


class State(gradring.tensorflow.elastic.State):
    """Variables and values that survive the loss of ranks."""

    def __init__(self, model: Any = None, optimizer: Any = None, **values: Any) -> None:
        """As `gradring.tensorflow.elastic.State`."""
        super().__init__(model, optimizer, **values)
        self._reset_callbacks: list[Callable[[], Any]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Has these called when the group has changed, before training goes on.

        All ranks call them, those that have joined too, with the values of the last commit. So what
        follows from the number of ranks, such as a learning rate, is the same everywhere, and
        collectives in them meet.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """The group has changed."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def reset(self) -> None:
        """Nothing; a subclass may have something to do when the group has changed."""

    def commit(self) -> None:
        """As `gradring.elastic.State.commit`: `save`, and processes join and leave."""
        self.save()
        if self._after_commit is not None:
            self._after_commit(True)

    def save(self) -> None:
        """Copies all values in memory; every rank calls it after the same step."""
        after, self._after_commit = self._after_commit, None
        try:
            super().commit()
        finally:
            self._after_commit = after

    def check_host_updates(self) -> None:
        """Lets processes join and leave without a commit, if there are any.

        Every rank calls it after the same step, inside of `run`: it is a collective of one byte.
        Values stay as they are then.
        """
        if self._after_commit is not None:
            try:
                self._after_commit(False)
            except HostsUpdatedInterrupt:
                self.save()
                raise

    def sync(self, communicator: Communicator | None = None) -> None:
        """As `gradring.elastic.State.sync`.

        Args:
            communicator: The group; default that of `hvd.init()`.
        """
        super().sync(communicator or basics.communicator())


class ObjectState(State):
    """Values, such as ``batch`` and ``epoch``."""

    def __init__(self, bcast_object: object = None, get_rank: object = None, **kwargs: Any) -> None:
        """Takes them, as the first commit.

        Args:
            bcast_object: Has no effect: values travel as commits do.
            get_rank: Has no effect.
            kwargs: Values, by name.
        """
        super().__init__(**kwargs)


class TensorFlowKerasState(State):
    """A model, its optimizer, and values such as ``batch`` and ``epoch``."""

    def __init__(
        self, model: Any, optimizer: Any = None, backend: None = None, **kwargs: Any
    ) -> None:
        """Takes them, as the first commit.

        Args:
            model: Of Keras, built.
            optimizer: If the model does not have it.
            backend: Nothing but None.
            kwargs: Values, by name.
        """
        super().__init__(model, optimizer, **kwargs)
        self._model, self._optimizer = model, optimizer

    @property
    def model(self) -> Any:
        """The model."""
        return self._model

    @property
    def optimizer(self) -> Any:
        """Its optimizer."""
        return self._optimizer or getattr(self._model, "optimizer", None)

    def _assign(self, values: Mapping[str, Any]) -> None:
        super()._assign(values)
        # A rank that joins has added up nothing, and all have to come to an update together.
        forget_sums(self.optimizer)


class TensorFlowState(State):
    """Variables, and values such as ``batch`` and ``epoch``."""

    def __init__(self, variables: Iterable[Any] = (), session: None = None, **kwargs: Any) -> None:
        """Takes them, as the first commit.

        Args:
            variables: Which.
            session: Nothing but None.
            kwargs: Values, by name.
        """
        super().__init__(variables=variables, **kwargs)


def run(func: _Train) -> _Train:
    """Makes a function of a state go on when processes are lost, leave or join.

    See `gradring.elastic.run`, which also bounds the number of workers.

    Args:
        func: The function; its first argument is a `State`.
    """

    @functools.wraps(func)
    def run_elastically(state: State, *args: Any, **kwargs: Any) -> Any:
        if isinstance(state, State) and type(state).sync is not State.sync:
            raise ConfigError(
                f"elastic.run: {type(state).__name__} has a sync() of its own, which would not be "
                "called; give State what has to be equal, or make it so in reset()"
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
