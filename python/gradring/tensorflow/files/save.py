"""Saving that every rank may call, and that leaves either the whole file or the one before.

Every rank writes, because writing can itself need collectives: reading an ON_READ variable adds up
the ranks' parts. The chief writes to a sibling of the destination and renames it when all of it is
there; the other ranks write to a temporary directory of their own that is gone afterwards.
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

    | `model` | `path` | what is written |
    |---|---|---|
    | Keras model | ends in `.keras` (or `.h5`) | the whole model, as `model.save` does |
    | Keras model | ends in `.weights.h5` | its weights, as `model.save_weights` does |
    | Keras model | anything else | a SavedModel directory for serving, as `model.export` does |
    | `tf.Module` | any | a SavedModel directory, as `tf.saved_model.save` does |
    | `tf.train.Checkpoint` | any | files with this prefix, as `checkpoint.write` does |

    What stood at `path` is replaced, and only when its successor is complete: a file in one step,
    the files of a directory or a checkpoint one after the other, those that name others last. All
    else in the directory stays. Load it with what fits:
    `keras.saving.load_model`, `model.load_weights`, `tf.saved_model.load`, `checkpoint.read`.
    It returns on every rank when the chief has put everything in its place.

    Args:
        model: A Keras model, a `tf.Module` or a `tf.train.Checkpoint`, the same on every rank.
        path: The destination, on the chief's file system; its directory must exist there.
        communicator: As for `all_reduce`.

    Raises:
        gradring.errors.SaveError: On every rank, when one of them could not save; it is an
            `OSError` and says which rank and why. The communicator stays usable, unless the rank
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
            # In a group, reading some variables would be a collective of the chief alone.
            if comm.rank == CHIEF and (comm.world_size > 1 or _is_written_here(model)):
                put(workspace, destination.parent)


def _is_written_here(model: Any) -> bool:
    """Workers of parameter servers, which form no group, are each the chief of one."""
    strategy = strategy_of(variables_of(model))
    extended = getattr(strategy, "extended", None) if communicator_of(strategy) else None
    return extended is None or bool(extended.should_checkpoint)


@contextlib.contextmanager
def _workspace(destination: Path, communicator: Communicator) -> Iterator[Path]:
    """An empty directory: the chief's is beside the destination, so that a rename moves it."""
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
        # Otherwise it prints the temporary path; some versions always do.
        quiet = "verbose" in inspect.signature(model.export).parameters
        model.export(str(path), **({"verbose": False} if quiet else {}))
    else:
        tf.saved_model.save(model, str(path))
