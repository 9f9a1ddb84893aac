"""A file of JSON lines about the steps of a training, of bounded size."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

#: A file that has become larger is kept as ``NAME.1`` in place of the one before, and a new one
#: begins: months of lines every ten seconds from few ranks, and never more than twice as much.
LIMIT_BYTES = 16 * 1024 * 1024
#: In a log directory.
NAME = "steps.jsonl"

_log = logging.getLogger("gradring")


class StepLog(RotatingFileHandler):
    """Appends lines; a disk that is full ends the log and not the training."""

    def __init__(self, path: str | os.PathLike[str], *, limit_bytes: int = LIMIT_BYTES) -> None:
        """Opens the file, in a directory that is made if missing.

        Raises:
            OSError: It cannot be written.
        """
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        super().__init__(path, maxBytes=limit_bytes, backupCount=1, encoding="utf-8")
        self._has_failed = False

    def write(self, row: dict[str, Any]) -> None:
        """Appends a line; warns, once, if that fails."""
        if not self._has_failed:
            self.handle(logging.makeLogRecord({"msg": json.dumps(row)}))

    def handleError(self, record: logging.LogRecord) -> None:
        """Ends the log."""
        self._has_failed = True
        error = sys.exc_info()[1]
        reason = getattr(error, "strerror", None) or error
        _log.warning("%s cannot be written any more (%s)", self.baseFilename, reason)
        # What is left in a buffer cannot be written either.
        with contextlib.suppress(OSError):
            self.close()


def opened(path: Path) -> StepLog | None:
    """The log; None, and a warning, if it cannot be opened.

    An error would end one rank 0 of an elastic job after the other.
    """
    try:
        return StepLog(path)
    except OSError as error:
        _log.warning("no %s is written: %s: %s", path.name, path.parent, error.strerror)
        return None


def forget(directory: Path) -> None:
    """Removes what an earlier run has left in a log directory."""
    for path in (directory / NAME, older(directory / NAME)):
        path.unlink(missing_ok=True)


def older(path: Path) -> Path:
    """Where the file before is kept."""
    return path.with_name(f"{path.name}.1")
