"""Standard output and standard error without a buffer, independent of `PYTHONUNBUFFERED`.

A buffer keeps bytes that a full disk or a closed pipe has refused. Writing them fails again when
the interpreter ends, and changes the exit code.
"""

from __future__ import annotations

import contextlib
import select
import sys
from typing import IO


def write(target: IO[bytes], data: bytes) -> None:
    """Writes all bytes past the stream's buffer, however many its reader takes at once.

    The stream may write only a part when a signal arrives. It may also be non-blocking, because
    another process at the same terminal has set this mode.

    Raises:
        OSError: The bytes cannot be written.
    """
    raw = getattr(target, "raw", target)
    rest = memoryview(data)
    while rest:
        written = raw.write(rest)
        if written is None:
            select.select([], [raw], [])
        rest = rest[written or 0 :]


def print_error(text: str) -> None:
    """Prints a line to standard error; if that fails, only the exit code shows the error."""
    with contextlib.suppress(OSError):
        write(sys.stderr.buffer, f"{text}\n".encode(sys.stderr.encoding, "backslashreplace"))
