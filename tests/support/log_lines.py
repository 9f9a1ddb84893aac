"""Lines that a process logs, for ranks of a test, which have no fixture `caplog`."""

import logging


def kept_lines(level: int = logging.NOTSET) -> list[str]:
    """Returns a list that gets the text of each record of gradring's loggers from now on."""
    lines: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gradring").addHandler(handler)
    return lines
