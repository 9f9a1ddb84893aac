"""Horovod Elastic's names for `gradring.elastic`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import gradring.elastic
import gradring.tensorflow.elastic
from gradring.communicator import Communicator
from gradring.horovod import basics

_Train = TypeVar("_Train", bound=Callable[..., Any])


class State(gradring.tensorflow.elastic.State):
    """Variables and values that survive the loss of ranks."""

    def __init__(self, model: Any = None, optimizer: Any = None, **values: Any) -> None:
        """As `gradring.tensorflow.elastic.State`."""
        super().__init__(model, optimizer, **values)
        self._reset_callbacks: list[Callable[[], Any]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Has these called when the group has changed, before training goes on."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """The group has changed."""
        for callback in self._reset_callbacks:
            callback()

    def check_host_updates(self) -> None:
        """Nothing: processes join and leave at commits."""

    def sync(self, communicator: Communicator | None = None) -> None:
        """As `gradring.elastic.State.sync`.

        Args:
            communicator: The group; default that of `hvd.init()`.
        """
        super().sync(communicator or basics.communicator())


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
        return self._optimizer or self._model.optimizer


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
        has_run = False

        @gradring.elastic.run(basics.communicator())
        @functools.wraps(func)
        def train(state: State, *args: Any, **kwargs: Any) -> Any:
            nonlocal has_run
            if has_run:
                state.on_reset()
            has_run = True
            return func(state, *args, **kwargs)

        return train(state, *args, **kwargs)

    return cast(_Train, run_elastically)
