"""Handler of the logger ``gradring``, for programs that configure no logging."""

from __future__ import annotations

import logging
import sys

_logger = logging.getLogger("gradring")


class _LogLines(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes each message to stderr with the prefix ``gradring:``.

    Without it, Python would write the bare message (`logging.lastResort`), among the lines of the
    program. A program that has handlers keeps its own format.
    """

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("gradring: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        handlers = [*_logger.handlers, *(logging.root.handlers if _logger.propagate else ())]
        if handlers == [self]:
            self.stream = sys.stderr  # a program may have replaced it
            super().emit(record)


def add() -> None:
    """Adds the handler, once in a process."""
    if not any(isinstance(handler, _LogLines) for handler in _logger.handlers):
        _logger.addHandler(_LogLines())
