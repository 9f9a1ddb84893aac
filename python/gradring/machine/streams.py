"""Standard output and standard error without a buffer, so that `PYTHONUNBUFFERED` changes nothing.

A buffer keeps what a full disk or a reader that has gone refuses, and fails again when the
interpreter ends, with another exit code.
"""

from __future__ import annotations

import contextlib
import select
import sys
from typing import IO


def write(target: IO[bytes], data: bytes) -> None:
    """Writes all of it past the stream's buffer, however much its reader takes at once.

    The stream may leave the rest when a signal arrives. It may also not block, because a process at
    the same terminal has made it so.

    Raises:
        OSError: It cannot be written.
    """
    raw = getattr(target, "raw", target)
    rest = memoryview(data)
    while rest:
        written = raw.write(rest)
        if written is None:
            select.select([], [raw], [])
        rest = rest[written or 0 :]


def print_error(text: str) -> None:
    """Prints a line to standard error; without one that can be written, the exit code says it."""
    with contextlib.suppress(OSError):
        write(sys.stderr.buffer, f"{text}\n".encode(sys.stderr.encoding, "backslashreplace"))
