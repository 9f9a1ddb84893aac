"""Models and optimizers in a `gradring.elastic.State`, and commits during `fit`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from gradring import elastic
from gradring.config import parse
from gradring.elastic import run
from gradring.errors import ConfigError
from gradring.group.communicator import Communicator
from gradring.group.together import agreed
from gradring.tensorflow.data import iterators
from gradring.tensorflow.graph.adoption import communicator_of, of_tensorflow
from gradring.tensorflow.graph.model_variables import (
    build,
    check_built,
    local_parts,
    optimizer_variables,
    optimizers_of,
    variables_of,
)
from gradring.tensorflow.graph.own_draws import note_shared
from gradring.tensorflow.rules.replicas import rule_of

__all__ = ["CommitState", "State", "run"]
__dir__ = __all__.copy


class State(elastic.State):
    """Values that are equal on all ranks, among them the variables of a model.

    A commit copies the variables to numpy arrays in memory; `restore` and `sync` assign them. See
    `gradring.elastic.State` for everything else.

    Examples:
        >>> weight = tf.Variable(1.0)
        >>> state = gradring.tensorflow.elastic.State(variables=[weight], step=0)
        >>> state.checkpoint_to("checkpoints", every_commits=10)
        >>> state.sync(comm)
        >>> for step in range(20):
        ...     weight.assign_add(0.5, read_value=False)
        ...     state.step += 1
        ...     state.commit()
        >>> state.flush()
        >>> weight.assign(np.nan, read_value=False)
        >>> state.restore()
        >>> float(weight), state.step
        (11.0, 20)
    """

    def __init__(
        self,
        model: Any = None,
        optimizer: Any = None,
        variables: Iterable[Any] = (),
        **values: Any,
    ) -> None:
        """Takes variables and values, as the first commit.

        Args:
            model: A Keras model that has been built, or a `tf.Module`. Its optimizers are included:
                that of `compile`, and those in attributes, as in a GAN. Its metrics are left out.
            optimizer: A Keras optimizer that is not part of the model. If it has not been built, it
                is built for `model`, or else for `variables`.
            variables: More variables.
            **values: Values by name, as for `gradring.elastic.State`.

        Raises:
            gradring.errors.ConfigError: The model has no variables yet; or the name of a value is
                that of a method, or begins with an underscore.
            TypeError: A value is neither an array of fixed width nor unchanged by a round trip
                through JSON.
        """
        check_built(model, "you make its State")
        # After a loss, a rank must re-form its group without waiting for abandoned iterators.
        iterators.let_leave()
        variables = list(variables)
        for each in (getattr(model, "optimizer", None), optimizer):
            build(each, model, variables)
        self._model = model
        self._optimizers = [] if model is None else list(optimizers_of(model))
        parts = [] if model is None else list(variables_of(model))
        parts += [*optimizer_variables(optimizer), *variables]
        kept = {id(part): part for part in parts if not _is_added_up(part)}
        self._variables = list(kept.values())
        # Keras' names contain counters of the process, which may differ between processes.
        self._variable_names = [
            f"variable {index}: {variable.dtype}{list(variable.shape)}"
            for index, variable in enumerate(map(of_tensorflow, self._variables))
        ]
        rule = rule_of(self._variables)
        if rule.holds_parts:
            rule.sync(self._variables)
        super().__init__(**values)

    def commit(self) -> None:
        """See `gradring.elastic.State.commit`.

        If the strategy's update rule lets replicas differ, it calls `sync_replicas` first.

        Raises:
            gradring.errors.ConfigError: The model has new variables since the state was made.
        """
        self._check_complete()
        rule_of(self._variables).sync(self._variables)
        super().commit()

    def _check_complete(self) -> None:
        """Refuses a commit that would lack new variables of the model.

        Replicas would differ in these variables after a restore.

        Raises:
            gradring.errors.ConfigError: The model has new variables since the state was made.
        """
        if self._model is None:
            return
        known = {id(variable) for variable in self._variables}
        for optimizer in optimizers_of(self._model):
            if not any(optimizer is each for each in self._optimizers):
                # A program may call `compile` in each group, which makes a new optimizer.
                known |= {id(variable) for variable in optimizer_variables(optimizer)}
        found = variables_of(self._model)
        late = [part for part in found if id(part) not in known and not _is_added_up(part)]
        if late:
            first = getattr(late[0], "path", late[0].name)
            more = f" and {len(late) - 1} more" if late[1:] else ""
            raise ConfigError(
                f"the model has variables that it did not have when its State was made, and a "
                f"commit would lose them: {first}{more}; build all layers and optimizers before: "
                "call the model on a batch, as in training, and call `optimizer.build`"
            )

    def _kept(self) -> Sequence[str]:
        return [*self._variable_names, *super()._kept()]

    def _values(self) -> dict[str, Any]:
        if not tf.executing_eagerly():
            raise ConfigError(
                "a State can be committed only outside of a tf.function: inside, this would happen "
                "once, when it is traced; call commit() where you call the tf.function"
            )
        arrays = [np.asarray(local_parts(variable)[0]) for variable in self._variables]
        return {**dict(zip(self._variable_names, arrays, strict=True)), **super()._values()}

    def _sync(self, communicator: Communicator, counts: bool) -> None:
        super()._sync(communicator, counts)
        note_shared(self._variables, communicator)

    def _assign(self, values: Mapping[str, Any]) -> None:
        for name, variable in zip(self._variable_names, self._variables, strict=True):
            for part in local_parts(variable):
                part.assign(values[name])
        rule_of(self._variables).forget(self._variables)
        super()._assign(values)


class CommitState(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Commits a state during `fit`.

    The callback updates these values of the state, if it has them. `epoch` is the number of ended
    epochs, and `step` is the number of steps in the current one. `stopped` is True once a callback,
    such as `EarlyStopping`, has ended the training. A program that resumes in the middle of an
    epoch trains on `batches.skip(state.step)` for the rest of it.

    Give the callback to `fit` as the last one, so that commits include the changes of the others.

    Examples:
        >>> strategy = gradring.tensorflow.CustomCollectiveStrategy()
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        >>> state = gradring.tensorflow.elastic.State(model=model, epoch=0, step=0)
        >>> state.checkpoint_to("checkpoints")
        >>> state.sync(strategy.communicator)
        >>> commits = gradring.tensorflow.elastic.CommitState(state, every_steps=2)
        >>> data = tf.data.Dataset.from_tensor_slices((tf.ones([24, 2]), tf.ones([24, 1]))).batch(8)
        >>> history = model.fit(
        ...     data, initial_epoch=state.epoch, epochs=2, verbose=0, callbacks=[commits]
        ... )
        >>> state.epoch, state.step
        (2, 0)
    """

    def __init__(self, state: elastic.State, every_steps: int = 50) -> None:
        """Commits after every `every_steps` steps, and at the end of every epoch.

        After an epoch's last step, there is only the commit of the epoch's end, which follows the
        validation.

        Args:
            state: State to commit, on every rank.
            every_steps: Steps between two commits, at least 1, the same on every rank; default 50.
                A commit copies all variables in memory.

        Raises:
            gradring.errors.ConfigError: `every_steps` is no whole number of at least 1.
        """
        super().__init__()
        self._state = state
        self._every_steps = parse.integer(every_steps, "CommitState: every_steps", minimum=1)
        self._before = 0
        self._committed = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Reads the position of the state, from which the training continues."""
        self._before = getattr(self._state, "step", 0)
        self._committed = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commits when `every_steps` steps have ended since the last commit.

        Raises:
            gradring.errors.SaveError: As for `gradring.elastic.State.commit`.
        """
        if ends_epoch(self, batch):
            # The epoch has no steps left, and `on_epoch_end` commits.
            return
        if (batch + 1) // self._every_steps > self._committed:
            self._committed = (batch + 1) // self._every_steps
            self._note(step=self._before + batch + 1)
            self._state.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commits the position at the beginning of the next epoch.

        Raises:
            gradring.errors.SaveError: As for `gradring.elastic.State.commit`.
        """
        self._before = self._committed = 0
        stops = bool(self.model.stop_training)
        communicator = communicator_of(self.model.distribute_strategy)
        if communicator is not None:
            stops = bool(communicator.all_reduce(int(stops), "max", name="CommitState: stopped"))
        self._note(epoch=epoch + 1, step=0, stopped=stops)
        self._state.commit()

    def _note(self, **position: int) -> None:
        for name, value in position.items():
            if hasattr(self._state, name):
                setattr(self._state, name, value)


def is_in_elastic_run(communicator: Communicator) -> bool:
    """Returns whether processes of the group leave and join at commits."""
    return communicator._participant is not None


def has_files(commits: CommitState) -> bool:
    """Returns whether the state's commits are written to files."""
    return commits._state._checkpoints is not None


def save_commit(commits: CommitState, epoch: int, steps: int) -> None:
    """Commits at once, and waits until the file is written; every rank calls it.

    Args:
        commits: The callback of the running `fit`.
        epoch: Number of the current epoch.
        steps: Steps of the epoch that this `fit` has done.

    Raises:
        gradring.errors.SaveError: On all ranks, if the file could not be written.
    """
    communicator = communicator_of(commits.model.distribute_strategy)
    assert communicator is not None, "its callback has asked for it"
    with agreed(communicator, "save", "the state of fit"):
        commits._note(epoch=epoch, step=commits._before + steps)
        commits._state.commit()
        commits._state._write()
        commits._state.flush()


def ends_epoch(callback: Any, batch: int) -> bool:
    """Returns whether a batch is known to be an epoch's last.

    Returns False if Keras does not know the number of steps.
    """
    steps = (callback.params or {}).get("steps")
    return steps is not None and batch + 1 >= steps


def _is_added_up(variable: Any) -> bool:
    """Returns whether each replica holds its own summand of a variable, such as of a metric."""
    inner = of_tensorflow(variable)
    on_read = getattr(inner, "synchronization", None) == tf.VariableSynchronization.ON_READ
    return bool(on_read and inner.aggregation == tf.VariableAggregation.SUM)
