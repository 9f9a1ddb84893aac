"""The last words of the rank that failed first, found in what it printed."""

from __future__ import annotations

from collections.abc import Sequence

TRACEBACK = b"Traceback (most recent call last):"
CHAINED = (
    b"During handling of the above exception, another exception occurred:",
    b"The above exception was the direct cause of the following exception:",
)
LAST_LINES = 20
MAX_LINES = 100


def last_words(stderr: Sequence[bytes], stdout: Sequence[bytes]) -> list[bytes]:
    """The last traceback with those that caused it, or else the last lines of output.

    Args:
        stderr: The last lines of standard error.
        stdout: The last lines of standard output, used when there is nothing else.
    """
    start = _start_of_last_traceback(stderr)
    if start is not None:
        return _shortened(list(stderr[start:]))
    return list(stderr[-LAST_LINES:]) or list(stdout[-LAST_LINES:])


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
