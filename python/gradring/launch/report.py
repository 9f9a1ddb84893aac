"""Failures of ranks: the first one, found by failure files and output, and its last words."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradring.errors import ConfigError
from gradring.launch.output import TRACEBACK

CHAINED = (
    b"During handling of the above exception, another exception occurred:",
    b"The above exception was the direct cause of the following exception:",
)
#: An error of gradring that names a rank; the second form occurs inside TensorFlow's errors.
BLAME = re.compile(
    rb"\bgradring(?:\.errors\.| )(\w+Error): (?:.*?\(collective #\d+\): )??rank (\d+) on "
)
#: A missing module, in a traceback and in the message of ``python -m``.
NO_MODULE = re.compile(rb": No module named '?(\w[\w.]*)")
#: TensorFlow's messages at its start, which are unrelated to a rank's end.
START_UP = re.compile(
    rb"\d{4}-\d\d-\d\d [\d:.]+: [IWE] (tensorflow|external)/|[IWE]\d{4} \d\d:\d\d:|"
    rb"WARNING: All log messages before absl::InitializeLog|To enable the following instructions: "
)
#: End of an error message from the operating system.
SYSTEM = b"(os error "
LAST_LINES = 20
#: Longest failure file that is read; longer than gradring writes.
LEFT_BYTES_MAX = 4096
MAX_LINES = 100


@dataclass(frozen=True)
class Blame:
    """The rank blamed by an error.

    Attributes:
        rank: The rank named by the error.
        kind: The error's class name.
        by_system: True if the operating system reported the loss; False if another rank did.
    """

    rank: int
    kind: str
    by_system: bool = False


def room_for_failures(prefix: str) -> tempfile.TemporaryDirectory[str]:
    """Makes a temporary directory for the failure files of ranks.

    Raises:
        ConfigError: No directory is writable, as in a container with a read-only disk.
    """
    try:
        return tempfile.TemporaryDirectory(prefix=prefix)
    except OSError as error:
        raise ConfigError(
            "the launcher needs a temporary directory, in which ranks write their errors "
            f"({error.strerror}); set TMPDIR to a directory that can be written, such as that of "
            "an emptyDir volume"
        ) from None


def last_words(stderr: Sequence[bytes], stdout: Sequence[bytes]) -> list[bytes]:
    """Returns the last traceback with its causes, or else the last lines of output.

    Args:
        stderr: The last lines of standard error.
        stdout: The last lines of standard output, used if standard error is empty.
    """
    start = _start_of_last_traceback(stderr)
    if start is not None:
        return _shortened(list(stderr[start:]))
    said = [line for line in stderr if not START_UP.match(line)]
    return said[-LAST_LINES:] or list(stdout[-LAST_LINES:])


def first_cause(blamed: Mapping[int, int | None]) -> int:
    """Returns the first rank that blames no other failed rank: the most likely cause.

    After a cut of the network, ranks on both sides blame each other. The result is then the first
    rank that blames the rank blamed most often.

    Args:
        blamed: The rank named by each failed rank's error, in the order of the failures.
    """
    causes = [rank for rank, named in blamed.items() if named == rank or named not in blamed]
    if causes:
        return causes[0]
    ((lost, _),) = Counter(blamed.values()).most_common(1)
    return next(rank for rank, named in blamed.items() if named == lost)


def blame_left(failure: Path, stderr: Sequence[bytes]) -> Blame | None:
    """Returns the rank blamed by a failed rank, from its failure file or its output.

    A rank without gradring has no failure file. The file's content is not trusted: the disk can be
    full, or a program can have written the file or replaced it by a pipe.

    Args:
        failure: The rank's ``GRADRING_FAILURE_FILE``.
        stderr: The last lines of standard error.
    """
    match _parsed(failure):
        case {"rank": None}:
            return None
        case {"rank": int(rank), "kind": str(kind)} if rank >= 0:
            return Blame(rank, kind, _is_by_system(stderr))
    return blame_printed(stderr)


def kind_left(failure: Path) -> str | None:
    """Returns the class name of the error that ended a rank, if its failure file has one."""
    match _parsed(failure):
        case {"kind": str(kind)}:
            return kind
    return None


def exit_code_left(failure: Path) -> int | None:
    """Returns the exit code of a rank, if `leave_exit_code` has written one."""
    match _parsed(failure):
        case {"exit_code": int(code)}:
            return code
    return None


def leave_exit_code(failure: Path, code: int) -> None:
    """Adds the exit code of a rank to its failure file."""
    left = _parsed(failure)
    with contextlib.suppress(OSError):  # a full disk
        failure.write_text(
            json.dumps({**(left if isinstance(left, dict) else {}), "exit_code": code})
        )


def has_joined(failure: Path) -> bool:
    """Returns True if a rank has joined others, according to its failure file."""
    match _parsed(failure):
        case {"alone": True}:
            return False
    return failure.is_file()


def port_left(failure: Path) -> int | None:
    """Returns the port of a server of tf.data service; None before it listens."""
    match _parsed(failure):
        case {"port": int(port)}:
            return port
    return None


def left_in(failure: Path) -> bytes:
    """Returns the content of a failure file; never blocks, not even on a pipe.

    Raises:
        OSError: The file does not exist, or is not a regular file.
    """
    with open(failure, "rb", opener=lambda path, how: os.open(path, how | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(failure))
        return file.read(LEFT_BYTES_MAX)


def blame_printed(stderr: Sequence[bytes]) -> Blame | None:
    """Returns the rank blamed by the last traceback, if its first exception is gradring's."""
    start = _start_of_last_traceback(stderr)
    for line in [] if start is None else stderr[start:]:
        if any(sentence in line for sentence in CHAINED):
            break
        if found := BLAME.search(line):
            return Blame(int(found[2]), found[1].decode(), SYSTEM in line)
    return None


def missing_module(words: Sequence[bytes]) -> str | None:
    """Returns the module that a rank did not find, if its last line names one."""
    found = NO_MODULE.search(words[-1]) if words else None
    return found[1].decode() if found else None


def _parsed(failure: Path) -> Any:
    """Parses a failure file; returns None if it is missing or not JSON."""
    try:
        return json.loads(left_in(failure))
    except (OSError, ValueError, RecursionError):
        return None


def _is_by_system(stderr: Sequence[bytes]) -> bool:
    start = _start_of_last_traceback(stderr)
    return start is not None and any(SYSTEM in line for line in stderr[start:])


def _start_of_last_traceback(lines: Sequence[bytes]) -> int | None:
    start: int | None = None
    for index in reversed(range(len(lines))):
        if TRACEBACK not in lines[index]:
            continue
        if start is not None and not any(
            sentence in line for line in lines[index:start] for sentence in CHAINED
        ):
            break
        start = index
    return start


def _shortened(lines: list[bytes]) -> list[bytes]:
    if len(lines) <= MAX_LINES:
        return lines
    half = MAX_LINES // 2
    return [*lines[:half], b"... %d lines left out ..." % (len(lines) - 2 * half), *lines[-half:]]
