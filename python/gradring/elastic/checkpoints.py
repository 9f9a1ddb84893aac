"""Commits on disk, for the death of a whole job.

A file is complete or not there: it is written under another name, flushed to the disk, and then
renamed. Its hash comes first, so a truncated or damaged file is noticed and skipped.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from gradring.config import parse
from gradring.elastic.commit import HASH_BYTES, Commit, hash_of

_logger = logging.getLogger("gradring")

_MAGIC = b"gradring commit 1\n"
_NAME = re.compile(r"commit-(\d{12})\.gradring")


class Checkpoints:
    """A directory of commits that keeps the newest ones.

    Args:
        directory: Created if it does not exist.
        keep: Number of files to keep; at least 1.

    Raises:
        ConfigError: ``keep`` is not a whole number of at least 1.
        OSError: The directory cannot be created.
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int) -> None:
        self._keep = parse.integer(keep, "keep", minimum=1)
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._wanted: Commit | None = None
        # Each writer has its own name, so that no two can write to one file.
        self._unfinished = self.directory / f"{uuid.uuid4().hex}.unfinished"
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        #: Number of failed writes in a row, and the error of the last one.
        self.failures = 0
        self._failed: Exception | None = None

    def write(self, commit: Commit) -> None:
        """Lets a thread write a commit, unless a newer commit arrives before it begins.

        A failed write is logged; the next commit is a new attempt.
        """
        with self._changed:
            self._wanted = commit
            if self._thread is None:
                # Not a daemon: the process ends only after the last write.
                thread = threading.Thread(target=self._write_all, name="gradring-checkpoints")
                try:
                    thread.start()
                except RuntimeError as error:  # the system cannot start a thread
                    self._note(commit, error)
                else:
                    self._thread = thread

    def flush(self) -> None:
        """Waits until the last commit passed to `write` is on the disk.

        Raises:
            OSError: The commit could not be written.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._thread is None)
        self.check()

    def check(self) -> None:
        """Raises the error of the last write, if it failed.

        Raises:
            OSError: The last write failed.
        """
        with self._changed:
            failures, failed = self.failures, self._failed
        if failed is not None:
            raise OSError(
                f"{self.directory}: {_described(failed)} ({failures} in a row); make room there, "
                "or give another directory"
            ) from failed

    def newest(self) -> Commit | None:
        """Returns the newest complete commit; damaged ones are logged and skipped.

        Raises:
            OSError: The directory cannot be read.
            MemoryError: A commit does not fit into memory.
        """
        for path in sorted(self._files(), reverse=True):
            try:
                commit = _read(path)
                commit.values()  # a right hash does not prove right contents
                return commit
            except MemoryError:
                raise
            except Exception as error:
                _logger.warning("the checkpoint %s is passed over: %s", path, _described(error))
        return None

    def _write_all(self) -> None:
        while True:
            with self._changed:
                commit, self._wanted = self._wanted, None
                if commit is None:
                    self._thread = None
                    self._changed.notify_all()
                    return
            failed = None
            try:
                self._write(commit)
            except Exception as error:
                failed = error
            self._note(commit, failed)

    def _note(self, commit: Commit, failed: Exception | None) -> None:
        with self._changed:
            before = self.failures
            self.failures, self._failed = (before + 1 if failed else 0), failed
        if failed is None and before:
            _logger.warning(
                "commit %d is in %s again, after %d that could not be written",
                *(commit.number, self.directory, before),
            )
        elif failed is not None and before & (before + 1) == 0:  # the 1st, 2nd, 4th, 8th in a row
            _logger.error(
                "commit %d could not be written to %s (%s); it stays in memory, and the next one "
                "is tried again (%d in a row)",
                *(commit.number, self.directory, _described(failed), before + 1),
            )

    def _write(self, commit: Commit) -> None:
        path = self.directory / f"commit-{commit.number:012d}.gradring"
        for left in self.directory.glob("*.unfinished"):
            left.unlink(missing_ok=True)
        try:
            with self._unfinished.open("wb") as file:
                file.write(_MAGIC)
                file.write(hash_of(commit.payload).data)
                file.write(commit.payload.data)
                file.flush()
                os.fsync(file.fileno())
            self._unfinished.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                self._unfinished.unlink()
            raise
        directory = os.open(self.directory, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
        # A file with a higher number is damaged or of an abandoned history, so it replaces none.
        for old in sorted(file for file in self._files() if file <= path)[: -self._keep]:
            with contextlib.suppress(OSError):
                old.unlink()

    def _files(self) -> Iterator[Path]:
        return (path for path in self.directory.iterdir() if _NAME.fullmatch(path.name))


def _read(path: Path) -> Commit:
    """Reads a commit.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is damaged or has another format.
    """
    match = _NAME.fullmatch(path.name)
    assert match is not None, path
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise ValueError("it is no commit of this version of gradring")
        expected = file.read(HASH_BYTES)
        payload = np.fromfile(file, np.uint8)
    if hash_of(payload).tobytes() != expected:
        raise ValueError(
            "its contents do not have its hash: it is torn, or the disk has changed it"
        )
    return Commit(int(match[1]), payload)


def _described(error: Exception) -> str:
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
