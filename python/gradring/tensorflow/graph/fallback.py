"""Fallbacks of code that only makes training faster or finds mistakes.

Such code reads graphs, layers and datasets of others. Where it meets something that it does not
know, one line in the log says so, and training goes on in the plain way. Errors of gradring are
verdicts, such as a mismatch of two ranks, and pass. Graphs and programs are the same on all ranks,
so all ranks fall back alike.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from gradring.tensorflow.graph.failures import failure_of

_logger = logging.getLogger("gradring")

#: The pieces that have been named in the log of this process.
_named: set[str] = set()


@contextlib.contextmanager
def falls_back(piece: str, instead: str) -> Iterator[None]:
    """Inside, or in a function that it decorates, errors that are no verdicts end the block.

    A decorated function returns None then. The log has one line for each piece and process.

    Args:
        piece: What cannot be done, as a noun with its article.
        instead: What happens in its place, as a sentence without its full stop.
    """
    try:
        yield
    except Exception as error:
        if failure_of(error) is not None:
            raise
        note(piece, instead, error)


def note(piece: str, instead: str, error: Exception) -> None:
    """Says, once for each piece in a process, that it is left out because of the error."""
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
