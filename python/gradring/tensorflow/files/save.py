"""Saving by all ranks, which leaves either the whole new file or the old one.

Every rank writes, because writing can itself need collectives: reading an ON_READ variable adds up
the ranks' parts. The chief writes to a sibling of the destination and renames it when it is
complete. The other ranks write to temporary directories, which are deleted afterwards.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

from gradring.group.communicator import Communicator
from gradring.group.together import agreed
from gradring.tensorflow.files.whole_files import beside, put
from gradring.tensorflow.graph.adoption import communicator_of, strategy_of
from gradring.tensorflow.graph.model_variables import variables_of
from gradring.tensorflow.graph.ops import group_of
from gradring.tensorflow.rules.replicas import sync_replicas

CHIEF = 0


def save(
    model: tf.keras.Model | tf.train.Checkpoint,
    path: str | os.PathLike[str],
    *,
    communicator: Communicator | None = None,
) -> None:
    """Saves a model or a checkpoint once; every rank must call it, eagerly.

    | `model` | `path` | written files |
    |---|---|---|
    | Keras model | ends in `.keras` (or `.h5`) | the whole model, as `model.save` does |
    | Keras model | ends in `.weights.h5` | its weights, as `model.save_weights` does |
    | Keras model | anything else | a SavedModel directory for serving, as `model.export` does |
    | `tf.Module` | any | a SavedModel directory, as `tf.saved_model.save` does |
    | `tf.train.Checkpoint` | any | files with this prefix, as `checkpoint.write` does |

    Existing files at `path` are replaced when the new ones are complete. A single file is replaced
    in one step. Files of a directory or a checkpoint are replaced one after the other, and files
    that name others come last. Other files in the directory stay. The function returns on every
    rank when the chief has put all files in place.

    The matching function loads the files: `keras.saving.load_model`, `model.load_weights`,
    `tf.saved_model.load` or `checkpoint.read`.

    Args:
        model: A Keras model, a `tf.Module` or a `tf.train.Checkpoint`, the same on every rank.
        path: The destination, on the chief's file system; its directory must exist there.
        communicator: As for `all_reduce`.

    Raises:
        gradring.errors.SaveError: A rank could not save. Every rank raises the error, an `OSError`
            that names the rank and the reason. The communicator stays usable, unless the rank
            failed in the middle of a collective of its own.

    Examples:
        >>> model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
        >>> gradring.tensorflow.save(model, "model.keras")
        >>> keras.saving.load_model("model.keras").count_params()
        3
    """
    comm = group_of(communicator)
    destination = Path(path).absolute()
    with _workspace(destination, comm) as workspace:
        written = workspace / destination.name
        with agreed(comm, "save", destination):
            if isinstance(model, tf.Module | tf.train.Checkpoint) or hasattr(model, "load_weights"):
                sync_replicas(model)
            _write(model, written)
        with agreed(comm, "save", destination):
            # `_is_written_here` can read variables: in a group, a collective of the chief alone.
            if comm.rank == CHIEF and (comm.world_size > 1 or _is_written_here(model)):
                put(workspace, destination.parent)


def _is_written_here(model: Any) -> bool:
    """Returns whether this process is to write the files, in a group of one.

    Workers of parameter servers form no group: each is the chief of its own, but only one writes.
    """
    strategy = strategy_of(variables_of(model))
    extended = getattr(strategy, "extended", None) if communicator_of(strategy) else None
    return extended is None or bool(extended.should_checkpoint)


@contextlib.contextmanager
def _workspace(destination: Path, communicator: Communicator) -> Iterator[Path]:
    """Makes an empty directory; the chief's is beside the destination, a rename away."""
    directory = destination.parent if communicator.rank == CHIEF else Path(tempfile.gettempdir())
    with contextlib.ExitStack() as stack:
        with agreed(communicator, "save", destination):
            written = stack.enter_context(beside(directory / destination.name))
        yield written.parent


def _write(model: Any, path: Path) -> None:
    if isinstance(model, tf.train.Checkpoint):
        model.write(str(path))
    elif path.name.endswith(".weights.h5"):
        model.save_weights(str(path))
    elif path.suffix in (".keras", ".h5"):
        model.save(str(path))
    elif hasattr(model, "export"):
        # Without verbose=False it prints the temporary path; some versions always do.
        quiet = "verbose" in inspect.signature(model.export).parameters
        model.export(str(path), **({"verbose": False} if quiet else {}))
    else:
        tf.saved_model.save(model, str(path))
