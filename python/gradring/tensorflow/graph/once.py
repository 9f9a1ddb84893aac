"""Warnings that rank 0 logs once in a process."""

from __future__ import annotations

import logging
from typing import Any

from gradring.group.communicator import Communicator

_log = logging.getLogger("gradring")

_warned: set[str] = set()


def warn(communicator: Communicator, key: str, text: str, *args: Any) -> None:
    """Warns on rank 0, once for each key.

    Args:
        communicator: Group of the job.
        key: Name of the warning.
        text: Text with `%` placeholders, such as those of `logging`.
        args: Values of the placeholders.
    """
    if key in _warned:
        return
    _warned.add(key)
    if communicator.rank == 0:
        _log.warning(text, *args)


def has_warned(key: str) -> bool:
    """Returns whether `warn` was called with this key on this rank."""
    return key in _warned


def forget() -> None:
    """Lets all warnings be logged once more."""
    _warned.clear()
