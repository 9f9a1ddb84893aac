"""Saves that leave a whole file, even if all ranks write to one path at the same time.

Each rank writes beside the destination, and moves the file into place when it is complete. The last
rank's file stays; replicas are equal, so all ranks write the same.
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
"""Suffixes of files that name other files."""

_guarded = False


def guard() -> None:
    """Makes TensorFlow's own functions save whole files; `compat_keras` does so for Keras'."""
    global _guarded
    if not _guarded:
        _guarded = True
        compat.replace({"save.save_and_return_nodes": _whole, "TrackableSaver.save": _whole})


def _whole(original: Callable[..., Any], saved: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for a function of TensorFlow, which makes the directories that a path needs."""
    return save(original, saved, *args, makes_directories=True, **kwargs)


def save(
    original: Callable[..., Any],
    saved: Any,
    *args: Any,
    makes_directories: bool = False,
    **kwargs: Any,
) -> Any:
    """Stands in for a function whose arguments begin with the saved object and a path."""
    named = next((each for each in _PATHS if each in kwargs), None)
    path = kwargs[named] if named else next(iter(args), None)
    destination = _replaceable(path, makes_directories)
    # The original must find an existing file itself if the program passes overwrite=False.
    if destination is None or kwargs.get("overwrite") is False:
        return original(saved, *args, **kwargs)
    # An existing directory can be the only writable place, such as a volume of a container.
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
    """Returns the real path of a destination, or None if it cannot be replaced by a rename.

    That is the case for URLs, in graphs, for devices and without a parent directory.
    """
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
    """Makes a directory beside the destination, a rename away, and deletes it after the block.

    Yields:
        The path to write to: the destination's name, in that directory.
    """
    directory = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent))
    try:
        yield directory / destination.name
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """Locks a directory against moves by other ranks of this machine, while the block runs.

    Without the lock, the data of one rank could end up with the index of another.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # some directories cannot be read or locked
            descriptor = os.open(directory, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def put(workspace: Path, directory: Path) -> None:
    """Moves all files from `workspace` to a directory; files that name others come last.

    New files are added to existing directories, at any depth. Other files in them stay.

    Raises:
        IsADirectoryError: A directory is in the place of a file.
        OSError: A file cannot be moved.
    """
    for written in sorted(workspace.iterdir(), key=lambda file: file.suffix in _LAST):
        target = directory / written.name
        if target.is_dir() and not written.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
        try:
            os.replace(written, target)
        except OSError:
            # A rename cannot replace a directory with contents, such as another rank's.
            if not (written.is_dir() and target.is_dir()):
                raise
            put(written, target)
