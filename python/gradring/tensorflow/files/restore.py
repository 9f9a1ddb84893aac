"""Restoring of models and checkpoints that `save` has written, even if only one rank has the file.

The lowest rank that finds the file reads it and sends the variables to all other ranks. So all
ranks get the same bits, even if they have different files.
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

#: Parts of checkpoints that have a state but are no variables.
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
    """Restores a model or a checkpoint that `save` has written; every rank must call it, eagerly.

    The state that an update rule keeps between steps, such as a sum of gradients, is dropped. It
    is kept if `only` some variables are restored.

    The file need not exist on all hosts: the lowest rank that finds it reads it and sends the
    variables to the others.

    | `model` | `path` | restored variables |
    |---|---|---|
    | Keras model | ends in `.keras` or `.h5` | its weights, and the state of its optimizers |
    | `tf.train.Checkpoint` | the prefix of its files | its variables |
    | `tf.Module` | a SavedModel directory | its variables |

    Args:
        model: The model, module or checkpoint, the same on every rank. Its variables must exist: a
            Keras model must be built. Keras optimizers are built if necessary. In a checkpoint of
            several models, or of none, the program has to build them.
        path: As for `save`.
        only: The variables to restore; all others keep their values. It is a list of variables and
            of patterns of their names, such as `"*/body/*"` (`fnmatch.fnmatchcase`), or a single
            one. The file must contain all variables nevertheless. Default: all.
        communicator: As for `all_reduce`.

    Raises:
        gradring.errors.RestoreError: No rank finds the file, or a rank cannot read it. Or it does
            not fit the model, or the model is not built. Or an entry of `only` matches no variable
            of the model. Or the model has parts that cannot be sent: variables of strings, or in a
            `tf.train.Checkpoint` an iterator, a table or a `PythonState`. Every rank raises the
            error, an `OSError` that names the rank and the reason. The variables keep their values
            on all ranks, and the communicator stays usable.

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
        # Variables that are not restored are synchronised as well.
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
    """Reads into the variables, and gives `keep` their old values; after a failure, all of them."""
    before = {
        id(local): (local, tf.identity(local))
        for variable in variables
        for local in local_parts(variable)
    }
    with alone():
        try:
            read()
        except BaseException:
            for local, value in before.values():
                local.assign(value)
            raise
        for variable in keep:
            for local in local_parts(variable):
                local.assign(before[id(local)][1])


def _reader(model: Any, source: Path) -> Callable[[], None]:
    """Returns a function that reads the file into the model, and builds the model's optimizers.

    Raises:
        gradring.errors.ConfigError: The model has no variables yet, or the file's type cannot be
            restored.
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
    # An unreadable path counts as missing, so that this rank does not fail alone.
    return os.path.exists(source) or os.path.exists(f"{source}.index")


def _check_sendable(model: Any, variables: list[Any]) -> None:
    """Refuses parts of a model that only the reading rank would get.

    Raises:
        gradring.errors.ConfigError: A variable has strings, or a part has a state but is no
            variable.
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
    """Builds the optimizers of a checkpoint's models, and optimizers next to a single model.

    An optimizer that is built later would get its values from the file when its variables are
    made, and only on the rank that reads.

    Raises:
        gradring.errors.ConfigError: An optimizer stands next to several models or none, so its
            variables are unknown.
    """
    parts = _parts_of(checkpoint)
    models = [part for part in parts if hasattr(part, "load_weights")]
    for model in models:
        build(getattr(model, "optimizer", None), model)
    # Models can contain models; every `Sequential` of Keras 3 does.
    inner = {id(part) for model in models for part in _parts_of(model)[1:]}
    whole = [model for model in models if id(model) not in inner]
    for part in parts:
        if not hasattr(part, "apply_gradients") or is_built(part):
            continue
        if len(whole) != 1:
            raise ConfigError(
                f"the checkpoint has an optimizer without variables, {type(part).__name__}, and "
                f"{len(whole)} models, so its variables are unknown; call its "
                "build(variables) before it is restored"
            )
        build(part, whole[0])


def _parts_of(model: Any) -> list[Any]:
    """Returns all objects that a checkpoint of the model contains, the model first."""
    return list(tf.train.TrackableView(model).descendants())


def _chosen(variables: list[Any], only: str | Sequence[Any]) -> list[Any]:
    """Returns the variables that match `only`, in the order of `variables`.

    Raises:
        gradring.errors.ConfigError: An entry of `only` matches no variable.
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
