"""Callbacks of Keras' `fit`, whose effects all ranks share even if only one rank has the callback.

A callback that only one rank has, such as the chief's `ModelCheckpoint`, must not need the other
ranks. So Keras' callbacks run no collectives. Collectives run at points that every rank reaches: at
the beginning and the end of `fit`, and at the end of each epoch. The exception is a
`ModelCheckpoint` of a program that knows of no replicas, if all ranks have it. Functions that stand
in for methods of Keras get the original first; `compat_keras.py` says where they are used.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from gradring.errors import MismatchError, RestoreError
from gradring.group.collectives import named
from gradring.group.require_equal import gather_if_different
from gradring.group.together import agreed
from gradring.tensorflow.data.python_batches import is_due
from gradring.tensorflow.graph.adoption import communicator_of, is_given, replicas_of
from gradring.tensorflow.graph.context import holding
from gradring.tensorflow.graph.model_variables import build, variables_of
from gradring.tensorflow.graph.ops import broadcast_variables
from gradring.tensorflow.keras import unlike_models
from gradring.tensorflow.rules.replicas import rule_of, sync, sync_model
from gradring.tensorflow.rules.updates import updates_of, updates_of_optimizers
from gradring.tensorflow.seams import keras_names

_log = logging.getLogger("gradring")

CHIEF = 0
#: Callbacks of Keras that do not save a model.
_SAVE_NOTHING = (
    *("CSVLogger", "EarlyStopping", "History", "LearningRateScheduler", "ProgbarLogger"),
    *("ReduceLROnPlateau", "TerminateOnNaN"),
)
#: Callbacks of Keras that stop a training or change its rate by the logs.
_DECIDE_BY_LOGS = ("EarlyStopping", "ReduceLROnPlateau")


@dataclass
class _Fit:
    """A `fit` that is running on all ranks."""

    model: Any
    #: True if the chief has a `ModelCheckpoint`; the others then skip theirs.
    chief_saves: bool = True
    #: True if a program that knows of no replicas has as many `ModelCheckpoint`s on every rank.
    save_together: bool = False
    #: Error of this rank's save, kept until the next collective sends it to all ranks.
    unsaved: Exception | None = None
    #: Error of the chief's restore, kept until the next collective sends it to all ranks.
    unrestored: Exception | None = None
    #: True if a callback of a rank may save.
    saves: bool = True
    #: False once differing variables were reported; the ranks then compare no more.
    compares: bool = True
    #: Number of executions of the training function that have ended.
    executions: int = 0


_fit: ContextVar[_Fit] = ContextVar("fit")


def is_in_fit(callbacks: Any) -> bool:
    """Returns whether a callback or `CallbackList` belongs to a `fit` that all ranks call."""
    fit = _fit.get(None)
    return fit is not None and callbacks.model is fit.model


def fit(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for `fit`; notes that it runs, for the functions below."""
    with holding(_fit, _Fit(model)):
        try:
            return original(model, *args, **kwargs)
        except BaseException:
            # Some versions of Keras would reuse the iterator in the next `fit`, in another group.
            keras_names.EVALUATION_ITERATOR.set(model, None)
            raise


def begin(original: Callable[..., Any], callbacks: Any, logs: Any = None) -> None:
    """Stands in for `CallbackList.on_train_begin`; sends the chief's restored backup to all."""
    keras: Any = sys.modules["keras"]

    def those(kind: type | tuple[type, ...]) -> list[Any]:
        return [callback for callback in callbacks.callbacks if isinstance(callback, kind)]

    fit = _fit.get()
    count = len(those(keras.callbacks.ModelCheckpoint))
    fit.chief_saves = bool(_from_chief(fit.model, count, "ModelCheckpoint"))
    if is_given(fit.model.distribute_strategy):
        counts = np.array([count, -count], np.int64)
        fit.model.distribute_strategy.communicator.all_reduce(counts, "max", name="fit: callbacks")
        fit.save_together = bool(counts[0] == -counts[1])
    backups = those(keras.callbacks.BackupAndRestore)
    if updates_of(fit.model.distribute_strategy).holds_parts:
        silent = tuple(getattr(keras.callbacks, name) for name in _SAVE_NOTHING)
        may_save = not all(type(callback) in silent for callback in callbacks.callbacks)
        found = np.array([may_save], np.int64)
        fit.model.distribute_strategy.communicator.all_reduce(found, "max", name="fit: saves")
        fit.saves = bool(found[0])
    if updates_of(fit.model.distribute_strategy).logs_own_samples:
        deciding = tuple(getattr(keras.callbacks, name) for name in _DECIDE_BY_LOGS)
        _warn_of_own_logs(fit.model, those(deciding))
    _restored(fit.model, backups, lambda: original(callbacks, logs))


def _warn_of_own_logs(model: Any, deciding: Sequence[Any]) -> None:
    """Warns on the first worker of callbacks by which each worker decides for itself."""
    strategy = model.distribute_strategy
    _, worker = strategy.extended.task
    if deciding and worker == 0 and replicas_of(strategy) > 1:
        _log.warning(
            "fit with update=%s: %s of each worker sees the logs of its own samples, so workers "
            "may stop after other epochs or train with other rates; use a fixed number of epochs "
            "and a schedule",
            strategy.update_rule,
            " and ".join(sorted({type(callback).__name__ for callback in deciding})),
        )


def end_batch(original: Callable[..., Any], callbacks: Any, batch: int, logs: Any = None) -> None:
    """Stands in for `CallbackList.on_train_batch_end`; all ranks stop here, or get an error.

    After the batches 1, 2, 4, 8, and so on, the ranks compare those that Python code has made.

    Raises:
        gradring.errors.ConfigError: Batches differ in the group of a strict strategy.
        gradring.errors.MismatchError: A callback has stopped the training on some ranks only.
    """
    original(callbacks, batch, logs)
    fit = _fit.get()
    model = fit.model
    fit.executions += 1
    if is_due(fit.executions):
        unlike_models.compare_batches(model.distribute_strategy)
    if not model.stop_training:
        return
    communicator = model.distribute_strategy.communicator
    # A rank that trains on meets this collective in its next step; the error names the cause.
    cause = f"fit: a callback has set stop_training after batch {batch}"
    try:
        communicator.all_reduce(np.zeros(1), name=cause)
    except MismatchError as error:
        raise MismatchError(
            f"{cause} on {named(communicator, communicator.rank)}, and others train on",
            advice="set it on every rank after the same batch, or at the end of an epoch, where "
            "one rank stops all",
            rank=communicator.rank,
            host=communicator.host,
        ) from error


def end_epoch(original: Callable[..., Any], callbacks: Any, epoch: int, logs: Any = None) -> None:
    """Stands in for `CallbackList.on_epoch_end`; all ranks stop if one does.

    Raises:
        gradring.errors.MismatchError: The ranks have different learning rates.
        gradring.errors.SaveError: On all ranks, if one could not save.
    """
    model = _fit.get().model
    # Rank 0 may be the only one that saves, so its weights must be those of all ranks.
    if _fit.get().saves:
        sync_model(model)
    original(callbacks, epoch, logs)
    communicator = model.distribute_strategy.communicator
    rate = _learning_rate(model)
    has_failed = _fit.get().unsaved is not None
    found = np.array([has_failed, model.stop_training, rate, -rate], np.float64)
    communicator.all_reduce(found, "max", name=f"fit: end of epoch {epoch}")
    unsaved, stop, most, least = found
    if unsaved:
        _raise_unsaved()
    if most != -least:
        raise MismatchError(
            f"fit on rank {communicator.rank} of {communicator.host}: after epoch {epoch} the "
            f"learning rate is {rate:g} here, and from {-least:g} to {most:g} on all ranks",
            advice="give callbacks that change the training, such as LearningRateScheduler, to "
            "every rank",
            rank=communicator.rank,
            host=communicator.host,
        )
    model.stop_training = bool(stop)
    epochs = (getattr(callbacks, "params", None) or {}).get("epochs")
    _warn_of_unlike_variables(epoch, model.stop_training or epoch + 1 == epochs)


def _warn_of_unlike_variables(epoch: int, is_last: bool) -> None:
    """Warns on rank 0, once in a `fit`, of variables with different values on the ranks.

    All weights are compared in a model's first epoch and in the last one of each `fit`, because
    their digest takes time.

    Raises:
        gradring.errors.ConfigError: Variables differ in the group of a strict strategy.
    """
    fit = _fit.get()
    model = fit.model
    if model.distribute_strategy.communicator.world_size == 1 or not fit.compares:
        return
    of_weights = is_last or not getattr(model, "_gradring_weights_compared", False)
    model._gradring_weights_compared = True
    fit.compares = not unlike_models.tell(model, f"epoch {epoch} of fit", of_weights)


def end(original: Callable[..., Any], callbacks: Any, logs: Any = None) -> None:
    """Stands in for `CallbackList.on_train_end`; waits until the chief has saved.

    After `fit`, one rank alone can save the whole state.
    """
    model = _fit.get().model
    if updates_of(model.distribute_strategy).holds_parts:
        sync_model(model)
    original(callbacks, logs)
    _raise_unsaved()


def may_have_parts_alone(callbacks: Any) -> bool:
    """Returns whether a `CallbackList` is outside of our strategies, and optimizers divide there.

    The optimizers can be those of another model, for which `sync` has nothing to do.
    """
    model = getattr(callbacks, "model", None)
    if communicator_of(getattr(model, "distribute_strategy", None)) is not None:
        return False
    return model is not None and updates_of_optimizers().holds_parts


def with_whole_state(
    original: Callable[..., Any], callbacks: Any, *args: Any, **kwargs: Any
) -> None:
    """Stands in for the ends of epochs and of `fit` outside of our strategies.

    Gives all ranks the whole state, since a callback of one rank may save.
    """
    sync(list(variables_of(callbacks.model)))
    original(callbacks, *args, **kwargs)


def save_backup(backup: Any, epoch: int) -> None:
    """Saves a `BackupAndRestore` of this `fit` in the middle of an epoch; all ranks call it.

    Raises:
        gradring.errors.SaveError: On all ranks, if one could not save.
    """
    sync_model(backup.model)
    # Keras sets the epoch only when an epoch ends; a restart would begin at the first epoch.
    keras_names.BACKUP_EPOCH.set(backup, epoch)
    keras_names.BACKUP_SAVE.of(backup)()
    _raise_unsaved()


def _raise_unsaved() -> None:
    """Waits for all ranks, and raises the error of a rank that could not save.

    Raises:
        gradring.errors.SaveError: On all ranks, if one could not save.
    """
    fit = _fit.get()
    with agreed(fit.model.distribute_strategy.communicator, "save", "a checkpoint of fit"):
        if fit.unsaved is not None:
            raise fit.unsaved


def checkpoint(original: Callable[..., Any], callback: Any, *args: Any, **kwargs: Any) -> None:
    """Saves on the chief or, if the chief has no `ModelCheckpoint`, on the ranks that have one.

    Programs may give the callback to all ranks, to the chief alone, or to one rank of each host.
    """
    before_saving(callback)
    if is_in_fit(callback) and _fit.get().save_together:
        _checkpoint_together(original, callback, *args, **kwargs)
    elif is_in_fit(callback) and not _fit.get().chief_saves:
        _saving(original, callback, *args, **kwargs)
    else:
        on_chief(original, callback, *args, **kwargs)


def _checkpoint_together(
    original: Callable[..., Any], callback: Any, *args: Any, **kwargs: Any
) -> None:
    """Saves a checkpoint of a program that knows of no replicas, and so may read it at once.

    All ranks run the same callbacks, so they may wait for each other. Each rank saves its own file
    if the paths differ, as those of temporary directories do.

    Raises:
        gradring.errors.SaveError: On all ranks, if one could not save.
    """
    communicator = callback.model.distribute_strategy.communicator
    path = os.path.abspath(os.fspath(callback.filepath))
    paths = gather_if_different(communicator, path.encode(), "fit: path of ModelCheckpoint")
    with agreed(communicator, "save", "a checkpoint of fit"):
        if paths is not None or communicator.rank == CHIEF:
            original(callback, *args, **kwargs)


def backup(original: Callable[..., Any], callback: Any) -> None:
    """Saves a backup on the chief."""
    before_saving(callback)
    on_chief(original, callback)


def before_saving(callback: Any) -> None:
    """Prepares a save by one rank; every rank that has the callback calls it."""
    model = callback.model
    updates_of(model.distribute_strategy).before_saving(model.trainable_variables)


def on_chief(original: Callable[..., Any], callback: Any, *args: Any, **kwargs: Any) -> None:
    """Saves on the chief only, because several writers would damage each other's files."""
    if callback.model.distribute_strategy.extended.should_checkpoint:
        _saving(original, callback, *args, **kwargs)


def _saving(original: Callable[..., Any], callback: Any, *args: Any, **kwargs: Any) -> None:
    """Saves; in `fit`, keeps an error for the next collective instead of raising on one rank."""
    try:
        original(callback, *args, **kwargs)
    except Exception as error:
        if not is_in_fit(callback):
            raise
        _log.error("fit could not save a checkpoint: %s", error)
        _fit.get().unsaved = error


def restore(original: Callable[..., Any], callback: Any, logs: Any = None) -> None:
    """Stands in for `BackupAndRestore.on_train_begin`; in `fit`, `begin` sends the result to all.

    Outside of `fit`, all ranks must call it.
    """
    if is_in_fit(callback):
        if callback.model.distribute_strategy.communicator.rank == CHIEF:
            try:
                original(callback, logs)
            except Exception as error:
                _fit.get().unrestored = error
    else:
        _restored(callback.model, [callback], lambda: on_chief(original, callback, logs))


def _restored(model: Any, backups: Sequence[Any], restore: Callable[[], None]) -> None:
    """Calls `restore`, then broadcasts variables and epoch if the chief has a backup."""
    communicator = model.distribute_strategy.communicator
    is_there = _from_chief(model, any(map(_has_backup, backups)), "BackupAndRestore")
    if is_there and model.optimizer is not None:
        build(model.optimizer, model)
    if is_there and updates_of(model.distribute_strategy).holds_parts:
        sync_model(model)
    restore()
    if is_there:
        with agreed(communicator, "restore", "a backup of fit", RestoreError):
            _raise_unrestored()
        metrics = getattr(model, "metrics_variables", ())
        variables = [*variables_of(model), *metrics]
        broadcast_variables(variables, CHIEF, communicator)
        rule_of(variables).forget(variables)
        epoch = _from_chief(model, keras_names.INITIAL_EPOCH.of(model) or 0, "BackupAndRestore")
        keras_names.INITIAL_EPOCH.set(model, epoch)
    else:
        _raise_unrestored()


def _raise_unrestored() -> None:
    fit = _fit.get(None)
    if fit is not None and fit.unrestored is not None:
        raise fit.unrestored


def _from_chief(model: Any, value: int, name: str) -> int:
    array = np.array([value], np.int64)
    model.distribute_strategy.communicator.broadcast(array, CHIEF, name=f"fit: {name}")
    return int(array[0])


def _has_backup(callback: Any) -> bool:
    paths = (keras_names.BACKUP_PATH.of(callback), keras_names.PREVIOUS_BACKUP.of(callback, ""))
    return any(tf.io.gfile.exists(path) for path in paths)


def _learning_rate(model: Any) -> float:
    """Returns the optimizer's learning rate, or 0 if a callback cannot set it."""
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    rate: Any = keras_names.LEARNING_RATE.of(optimizer, None)
    return float(rate.numpy()) if hasattr(rate, "numpy") else 0.0
