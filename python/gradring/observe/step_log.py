"""A file of JSON lines about the steps of a training, of bounded size."""

from __future__ import annotations

import io
import json
import logging
import os
from pathlib import Path
from typing import Any

#: A file that has become larger is kept as ``NAME.1`` in place of the one before, and a new one
#: begins: months of lines every ten seconds from few ranks, and never more than twice as much.
LIMIT_BYTES = 16 * 1024 * 1024
#: In a log directory.
NAME = "steps.jsonl"

_log = logging.getLogger("gradring")


class StepLog:
    """Appends lines; a disk that is full ends the log and not the training."""

    def __init__(self, path: str | os.PathLike[str], *, limit_bytes: int = LIMIT_BYTES) -> None:
        """Opens the file, in a directory that is made if missing.

        Raises:
            OSError: It cannot be written.
        """
        self._path = Path(path)
        self._limit_bytes = limit_bytes
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file: io.FileIO | None = self._open()

    def write(self, row: dict[str, Any]) -> None:
        """Appends a line; warns, once, if that fails."""
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(row).encode() + b"\n")
            if self._file.tell() >= self._limit_bytes:
                self._file.close()
                self._path.replace(older(self._path))
                self._file = self._open()
        except OSError as error:
            _log.warning("%s cannot be written any more (%s)", self._path, error.strerror)
            self.close()

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> io.FileIO:
        # Without a buffer, so that a job that dies has written all it has shown.
        return self._path.open("ab", buffering=0)


def in_directory(directory: Path) -> StepLog | None:
    """The log in a directory that nobody asked to have it in: None, and a warning, if it fails."""
    try:
        return StepLog(directory / NAME)
    except OSError as error:
        _log.warning("no %s is written: %s: %s", NAME, directory, error.strerror)
        return None


def forget(directory: Path) -> None:
    """Removes what an earlier run has left in a log directory."""
    for path in (directory / NAME, older(directory / NAME)):
        path.unlink(missing_ok=True)


def older(path: Path) -> Path:
    """Where the file before is kept."""
    return path.with_name(f"{path.name}.1")
