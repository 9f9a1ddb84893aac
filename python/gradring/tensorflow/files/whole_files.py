"""Saves that leave a whole file, also where all ranks write to one path at the same time.

Each writes beside the destination, and puts the file in its place when all of it is there. The last
one counts; replicas are equal, so that each has written the same.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

from gradring.tensorflow.graph import compat

_PATHS = ("filepath", "file_prefix", "export_dir")
_LAST = (".index", ".json", ".pb")
"""Files that name others, by how they end."""

_guarded = False


def guard() -> None:
    """Lets TensorFlow's own ways to save do so; `compat_keras` does it for Keras'."""
    global _guarded
    if not _guarded:
        _guarded = True
        compat.replace({"save.save_and_return_nodes": _whole, "TrackableSaver.save": _whole})


def _whole(original: Callable[..., Any], saved: Any, *args: Any, **kwargs: Any) -> Any:
    """One of TensorFlow's, which make the directories that a path needs."""
    return save(original, saved, *args, makes_directories=True, **kwargs)


def save(
    original: Callable[..., Any],
    saved: Any,
    *args: Any,
    makes_directories: bool = False,
    **kwargs: Any,
) -> Any:
    """Stands in for a function that takes what is saved, and then a path."""
    named = next((each for each in _PATHS if each in kwargs), None)
    path = kwargs[named] if named else next(iter(args), None)
    destination = _replaceable(path, makes_directories)
    # What must not be overwritten is looked for where it would be.
    if destination is None or kwargs.get("overwrite") is False:
        return original(saved, *args, **kwargs)
    # A directory may be all that can be written here, such as a volume of a container.
    is_there = destination.is_dir()
    with beside(destination / destination.name if is_there else destination) as written:
        if named:
            result = original(saved, *args, **{**kwargs, named: str(written)})
        else:
            result = original(saved, str(written), *args[1:], **kwargs)
        with _alone_in(destination.parent):
            put(written.parent, destination.parent)
    return tf.constant(str(path)) if isinstance(result, tf.Tensor) else result


def _replaceable(path: Any, makes_directories: bool) -> Path | None:
    """Where a path leads, if a file or directory of this system can stand there."""
    if not isinstance(path, str | os.PathLike) or "://" in os.fspath(path):
        return None
    if not tf.executing_eagerly():
        return None
    found = Path(os.path.realpath(path))
    if found.exists() and not (found.is_file() or found.is_dir()):
        return None
    if makes_directories:
        found.parent.mkdir(parents=True, exist_ok=True)
    return found if found.parent.is_dir() else None


@contextlib.contextmanager
def beside(destination: Path) -> Iterator[Path]:
    """The path to write to instead: the same name, in a directory from which a rename moves it."""
    directory = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent))
    try:
        yield directory / destination.name
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """Inside, no other rank of this machine moves files there: data of one, index of another."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # not all directories can be read, or have locks
            descriptor = os.open(directory, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def put(workspace: Path, directory: Path) -> None:
    """Moves all from `workspace` to a directory; what names the others comes last.

    Directories that are there, at any depth, get what is new. All else that is in them stays.

    Raises:
        IsADirectoryError: A file is to be where a directory is.
        OSError: Something cannot be moved.
    """
    for written in sorted(workspace.iterdir(), key=lambda file: file.suffix in _LAST):
        target = directory / written.name
        if target.is_dir() and not written.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
        try:
            os.replace(written, target)
        except OSError:
            # A directory cannot replace one that has contents, as another rank's may have by now.
            if not (written.is_dir() and target.is_dir()):
                raise
            put(written, target)
