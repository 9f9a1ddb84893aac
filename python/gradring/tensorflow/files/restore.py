"""Restoring what `save` has saved, also where only one rank has the file.

The first rank that finds the file reads it; every other one receives the variables from it. So all
have the same bits, whatever stands on the disks of the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from gradring.errors import ConfigError, RestoreError
from gradring.gradients.names import name_of
from gradring.group.communicator import Communicator
from gradring.group.together import agreed
from gradring.tensorflow.graph.cross_device_ops import alone
from gradring.tensorflow.graph.model_variables import (
    build,
    check_built,
    is_built,
    local_parts,
    variables_of,
)
from gradring.tensorflow.graph.ops import broadcast_variables, group_of
from gradring.tensorflow.graph.reduction import Variable
from gradring.tensorflow.rules.replicas import rule_of, sync

#: What a checkpoint can have beside variables.
_STATES = (
    tf.data.Iterator,
    tf.lookup.experimental.DenseHashTable,
    tf.lookup.experimental.MutableHashTable,
    tf.train.experimental.PythonState,
)


def restore(
    model: tf.keras.Model | tf.Module | tf.train.Checkpoint,
    path: str | os.PathLike[str],
    only: str | Sequence[Variable | str] | None = None,
    *,
    communicator: Communicator | None = None,
) -> None:
    """Restores what `save` has saved; every rank must call it, eagerly.

    What an update rule has begun, such as a sum of the gradients of some steps, or keeps for the
    next step, is void, unless `only` some variables are restored.

    The file may exist on one host only: the lowest rank that finds it reads it and sends the
    variables to the others.

    | `model` | `path` | what is restored |
    |---|---|---|
    | Keras model | ends in `.keras` or `.h5` | its weights, and the state of its optimizers |
    | `tf.train.Checkpoint` | the prefix of its files | its variables |
    | `tf.Module` | a SavedModel directory | its variables |

    Args:
        model: What has the variables, the same on every rank. Its variables must exist: a Keras
            model must be built. Optimizers of Keras are built if they are not; in a checkpoint of
            several models, or none, the program has to build them.
        path: As for `save`.
        only: Restore these variables alone, the others keep their values: variables, or patterns of
            their names such as `"*/body/*"` (`fnmatch.fnmatchcase`), or one pattern. All must be in
            the file nevertheless. Default: all.
        communicator: As for `all_reduce`.

    Raises:
        gradring.errors.RestoreError: On every rank, when no rank finds the file, or one cannot read
            it, or it does not fit the model, which may not be built, or `only` names no variable
            of it, or the model has a variable of strings or (in a `tf.train.Checkpoint`) an
            iterator, a table or a `PythonState`, which cannot be sent. It is an `OSError` and says
            which rank and why; the variables keep their values on all ranks, and the communicator
            stays usable.

    Examples:
        >>> layer = keras.layers.Dense(1, bias_initializer="ones")
        >>> model = keras.Sequential([keras.Input([2]), layer])
        >>> gradring.tensorflow.save(model, "model.weights.h5")
        >>> model.set_weights([np.zeros((2, 1)), np.zeros(1)])
        >>> gradring.tensorflow.restore(model, "model.weights.h5", only="*/bias")
        >>> [weight.tolist() for weight in model.get_weights()]
        [[[0.0], [0.0]], [1.0]]
    """
    comm = group_of(communicator)
    source = Path(path).absolute()
    with agreed(comm, "restore", source, RestoreError):
        read = _reader(model, source)
        variables = list(variables_of(model))
        chosen = variables if only is None else _chosen(variables, only)
        _check_sendable(model, chosen)
        # The variables that are not restored, too.
        sync(variables)
    found = comm.all_gather(np.array([int(_exists(source))]), name="restore/exists")
    if not found.any():
        hosts = ", ".join(sorted(set(comm.hosts)))
        raise RestoreError(
            f"no rank can restore {source}: there is no such file on any host of the group "
            f"({hosts}); give the path that was saved"
        )
    reader = int(np.flatnonzero(found)[0])
    with agreed(comm, "restore", source, RestoreError):
        if comm.rank == reader:
            _read(read, variables, keep=[] if only is None else _others(variables, chosen))
    broadcast_variables(
        [local for variable in chosen for local in local_parts(variable)], reader, comm
    )
    if only is None:
        rule_of(variables).forget(variables)


def _read(read: Callable[[], None], variables: list[Any], keep: list[Any]) -> None:
    """Reads into the variables; all have their values again if it fails, and `keep` in any case."""
    before = {
        id(local): (local, tf.identity(local))
        for variable in variables
        for local in local_parts(variable)
    }
    try:
        with alone():
            read()
    except BaseException:
        for local, value in before.values():
            local.assign(value)
        raise
    for variable in keep:
        for local in local_parts(variable):
            local.assign(before[id(local)][1])


def _reader(model: Any, source: Path) -> Callable[[], None]:
    """What reads the file into the model, whose variables all exist then.

    Raises:
        gradring.errors.ConfigError: It has no variables yet, or such a file cannot be restored.
    """
    if isinstance(model, tf.train.Checkpoint):
        _build_optimizers(model)
        return lambda: model.read(str(source)).assert_existing_objects_matched()
    if hasattr(model, "load_weights"):
        if source.suffix not in (".keras", ".h5"):
            raise ConfigError(
                f"a Keras model is restored from a file that ends in .keras, .h5 or .weights.h5, "
                f"not from {source}; a directory of `model.export` is for serving"
            )
        check_built(model, "it is restored")
        build(getattr(model, "optimizer", None), model)
        return lambda: model.load_weights(str(source))
    checkpoint = tf.train.Checkpoint(model)
    variables = str(source / "variables" / "variables")
    return lambda: checkpoint.read(variables).assert_existing_objects_matched()


def _exists(source: Path) -> bool:
    # What a rank may not look at is not there, and no error of this rank alone.
    return os.path.exists(source) or os.path.exists(f"{source}.index")


def _check_sendable(model: Any, variables: list[Any]) -> None:
    """Refuses what only the rank that reads would have.

    Raises:
        gradring.errors.ConfigError: There is a text, or a state that is no variable.
    """
    texts = [part for part in variables if tf.as_dtype(part.dtype) == tf.string]
    parts = []
    if isinstance(model, tf.train.Checkpoint):
        parts = _parts_of(model)
    states = [f"a {type(part).__name__}" for part in parts if isinstance(part, _STATES)]
    unsent = [f"the variable {name_of(text)} of strings" for text in texts] + states
    if unsent:
        raise ConfigError(
            f"{unsent[0]} cannot be sent to other ranks; let all ranks call "
            "`checkpoint.read` on a file that each can read, or leave it out of the checkpoint"
        )


def _build_optimizers(checkpoint: tf.train.Checkpoint) -> None:
    """The optimizers of the models in it, or beside one, get their variables.

    Raises:
        gradring.errors.ConfigError: It cannot be known which those of an optimizer are. They would
            be restored when they are made, and by the rank alone that reads.
    """
    parts = _parts_of(checkpoint)
    models = [part for part in parts if hasattr(part, "load_weights")]
    for model in models:
        build(getattr(model, "optimizer", None), model)
    # Models have models in them, as every `Sequential` of Keras 3 has.
    inner = {id(part) for model in models for part in _parts_of(model)[1:]}
    whole = [model for model in models if id(model) not in inner]
    for part in parts:
        if not hasattr(part, "apply_gradients") or is_built(part):
            continue
        if len(whole) != 1:
            raise ConfigError(
                f"the checkpoint has an optimizer without variables, {type(part).__name__}, and "
                f"{len(whole)} models, so it is not known what it trains; call its "
                "build(variables) before it is restored"
            )
        build(part, whole[0])


def _parts_of(model: Any) -> list[Any]:
    """All that a checkpoint of it would have, itself first."""
    return list(tf.train.TrackableView(model).descendants())


def _chosen(variables: list[Any], only: str | Sequence[Any]) -> list[Any]:
    """Those that are meant, in their order.

    Raises:
        gradring.errors.ConfigError: Nothing is meant by one of them.
    """
    wishes = [only] if isinstance(only, str) or hasattr(only, "assign") else list(only)
    meant = [[variable for variable in variables if _is_meant(variable, wish)] for wish in wishes]
    for wish, those in zip(wishes, meant, strict=True):
        if not those:
            names = ", ".join(sorted(map(name_of, variables)))
            raise ConfigError(
                f"only={wish if isinstance(wish, str) else name_of(wish)!r} is no variable of the "
                f"model, which has {names}"
            )
    ids = {id(variable) for those in meant for variable in those}
    return [variable for variable in variables if id(variable) in ids]


def _is_meant(variable: Any, wish: Any) -> bool:
    if isinstance(wish, str):
        return fnmatchcase(name_of(variable), wish)
    return local_parts(variable)[0] is local_parts(wish)[0]


def _others(variables: list[Any], chosen: list[Any]) -> list[Any]:
    ids = {id(variable) for variable in chosen}
    return [variable for variable in variables if id(variable) not in ids]
