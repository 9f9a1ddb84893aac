"""Fallbacks of code that only makes training faster or finds mistakes.

This code reads graphs, layers and datasets of others. If it meets something unknown, it logs one
line, and training continues in the plain way. Errors of gradring are verdicts, such as a mismatch
of two ranks, and are raised. Graphs and programs are the same on all ranks, so all ranks fall back
in the same places.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from gradring.tensorflow.graph.failures import failure_of

_logger = logging.getLogger("gradring")

#: The pieces that this process has already logged.
_named: set[str] = set()


@contextlib.contextmanager
def falls_back(piece: str, instead: str) -> Iterator[None]:
    """Ends the block, or the decorated function, at an error that is not gradring's.

    A decorated function then returns None. The log gets one line for each piece and process.

    Args:
        piece: Name of the work that is left out, with its article.
        instead: Consequence for the program, as a sentence without its full stop.
    """
    try:
        yield
    except Exception as error:
        if failure_of(error) is not None:
            raise
        note(piece, instead, error)


def note(piece: str, instead: str, error: Exception) -> None:
    """Logs that a piece is left out because of the error, once for each piece and process."""
    if piece in _named:
        return
    _named.add(piece)
    (reason, *_) = str(error).strip().splitlines() or [""]
    _logger.warning(
        "%s is left out, because of something that gradring does not know (%s: %s); %s",
        piece,
        type(error).__name__,
        reason,
        instead,
    )
