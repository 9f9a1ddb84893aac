"""A file of JSON lines about training steps, with bounded size."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sys
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

#: Size at which a file is renamed to ``NAME.1``, replacing an older one, and a new file begins. It
#: holds months of lines every ten seconds from few ranks.
LIMIT_BYTES = 16 * 1024 * 1024
#: Name of the file in a log directory.
NAME = "steps.jsonl"

_log = logging.getLogger("gradring")


class StepLog(RotatingFileHandler):
    """A log that appends lines; a full disk ends the log, but not the training."""

    def __init__(self, path: str | os.PathLike[str], *, limit_bytes: int = LIMIT_BYTES) -> None:
        """Opens the file, and makes its directory if missing.

        Raises:
            OSError: The file cannot be written.
        """
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        super().__init__(path, maxBytes=limit_bytes, backupCount=1, encoding="utf-8")
        self._has_failed = False

    def write(self, row: dict[str, Any]) -> None:
        """Appends a line; warns once if writing fails."""
        if not self._has_failed:
            self.handle(logging.makeLogRecord({"msg": json.dumps(row)}))

    def handleError(self, record: logging.LogRecord) -> None:
        """Ends the log with a warning."""
        self._has_failed = True
        error = sys.exc_info()[1]
        reason = getattr(error, "strerror", None) or error
        path, host = self.baseFilename, socket.gethostname()
        _log.warning("%s on %s cannot be written any more (%s)", path, host, reason)
        # Closing flushes the buffer, which fails too.
        with contextlib.suppress(OSError):
            self.close()


def opened(path: Path) -> StepLog | None:
    """Returns the log; None, with a warning, if it cannot be opened.

    An error would end each new rank 0 of an elastic job in turn.
    """
    try:
        return StepLog(path)
    except OSError as error:
        _log.warning("no %s is written: %s: %s", path.name, path.parent, error.strerror)
        return None


def forget(directory: Path) -> None:
    """Removes an earlier run's files from a log directory."""
    for path in (directory / NAME, older(directory / NAME)):
        path.unlink(missing_ok=True)


def older(path: Path) -> Path:
    """Returns the path of the renamed older file."""
    return path.with_name(f"{path.name}.1")
