"""Failures of ranks: which was first, by what they have left or printed, and its last words."""

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
#: An error of gradring's that names a rank; the second form is inside an error of TensorFlow's.
BLAME = re.compile(
    rb"\bgradring(?:\.errors\.| )(\w+Error): (?:.*?\(collective #\d+\): )??rank (\d+) on "
)
#: In a traceback, and as ``python -m`` says it.
NO_MODULE = re.compile(rb": No module named '?(\w[\w.]*)")
#: What TensorFlow prints when it starts, which says nothing about a rank's end.
START_UP = re.compile(
    rb"\d{4}-\d\d-\d\d [\d:.]+: [IWE] (tensorflow|external)/|[IWE]\d{4} \d\d:\d\d:|"
    rb"WARNING: All log messages before absl::InitializeLog|To enable the following instructions: "
)
#: What an error of the operating system ends with.
SYSTEM = b"(os error "
LAST_LINES = 20
#: Of what a rank leaves about its failure: more than gradring writes.
LEFT_BYTES_MAX = 4096
MAX_LINES = 100


@dataclass(frozen=True)
class Blame:
    """Whom an error blames.

    Attributes:
        rank: The rank that it names.
        kind: The name of its class.
        by_system: Whether the operating system has found the loss, and not another rank's word.
    """

    rank: int
    kind: str
    by_system: bool = False


def room_for_failures(prefix: str) -> tempfile.TemporaryDirectory[str]:
    """A directory in which ranks leave why they fail.

    Raises:
        ConfigError: There is no place for one, as in a container whose disk is read-only.
    """
    try:
        return tempfile.TemporaryDirectory(prefix=prefix)
    except OSError as error:
        raise ConfigError(
            "the launcher needs a temporary directory, in which ranks leave why they fail "
            f"({error.strerror}); set TMPDIR to a directory that can be written, such as that of "
            "an emptyDir volume"
        ) from None


def last_words(stderr: Sequence[bytes], stdout: Sequence[bytes]) -> list[bytes]:
    """The last traceback with those that caused it, or else the last lines of output.

    Args:
        stderr: The last lines of standard error.
        stdout: The last lines of standard output, used when there is nothing else.
    """
    start = _start_of_last_traceback(stderr)
    if start is not None:
        return _shortened(list(stderr[start:]))
    said = [line for line in stderr if not START_UP.match(line)]
    return said[-LAST_LINES:] or list(stdout[-LAST_LINES:])


def first_cause(blamed: Mapping[int, int | None]) -> int:
    """The rank whose failure is most likely the cause of the others': the first to blame no other.

    Where the network was cut, ranks on both sides blame each other; it is then the first of those
    that blame the rank that most of them have lost.

    Args:
        blamed: By rank that failed, in the order in which they did, the rank that its error names.
    """
    causes = [rank for rank, named in blamed.items() if named == rank or named not in blamed]
    if causes:
        return causes[0]
    ((lost, _),) = Counter(blamed.values()).most_common(1)
    return next(rank for rank, named in blamed.items() if named == lost)


def blame_left(failure: Path, stderr: Sequence[bytes]) -> Blame | None:
    """Whom a rank that has failed blames: by the file that gradring has left there, or its text.

    A rank without gradring leaves none. What is in the file may be anything: the disk may be full,
    and a program may have written there, or made a pipe of it.

    Args:
        failure: What ``GRADRING_FAILURE_FILE`` was for the rank.
        stderr: The last lines of standard error.
    """
    match _parsed(failure):
        case {"rank": None}:
            return None
        case {"rank": int(rank), "kind": str(kind)} if rank >= 0:
            return Blame(rank, kind, _is_by_system(stderr))
    return blame_printed(stderr)


def kind_left(failure: Path) -> str | None:
    """The name of the error that has ended a rank, if gradring has left it there."""
    match _parsed(failure):
        case {"kind": str(kind)}:
            return kind
    return None


def exit_code_left(failure: Path) -> int | None:
    """The exit code of a rank, if `leave_exit_code` has left it there."""
    match _parsed(failure):
        case {"exit_code": int(code)}:
            return code
    return None


def leave_exit_code(failure: Path, code: int) -> None:
    """Adds the exit code of a rank to what it has left about its failure."""
    left = _parsed(failure)
    with contextlib.suppress(OSError):  # a full disk
        failure.write_text(
            json.dumps({**(left if isinstance(left, dict) else {}), "exit_code": code})
        )


def has_joined(failure: Path) -> bool:
    """Whether a rank that was started to join others has done so, by the file that it leaves."""
    match _parsed(failure):
        case {"alone": True}:
            return False
    return failure.is_file()


def port_left(failure: Path) -> int | None:
    """Where a server of tf.data service listens, once it does."""
    match _parsed(failure):
        case {"port": int(port)}:
            return port
    return None


def left_in(failure: Path) -> bytes:
    """What is in the file of a rank that has failed; never waits.

    Raises:
        OSError: It does not exist, or is no regular file.
    """
    with open(failure, "rb", opener=lambda path, how: os.open(path, how | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(failure))
        return file.read(LEFT_BYTES_MAX)


def blame_printed(stderr: Sequence[bytes]) -> Blame | None:
    """Whom the last traceback blames, if its first exception is one of gradring's."""
    start = _start_of_last_traceback(stderr)
    for line in [] if start is None else stderr[start:]:
        if any(sentence in line for sentence in CHAINED):
            break
        if found := BLAME.search(line):
            return Blame(int(found[2]), found[1].decode(), SYSTEM in line)
    return None


def missing_module(words: Sequence[bytes]) -> str | None:
    """The module that a rank did not find, if its last line says so."""
    found = NO_MODULE.search(words[-1]) if words else None
    return found[1].decode() if found else None


def _parsed(failure: Path) -> Any:
    """What the file of a rank says; None if that is nothing, or anything else."""
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
