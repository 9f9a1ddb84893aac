"""Values that hold inside of a block, in the thread that runs it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


@contextlib.contextmanager
def holding(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Inside, the variable has this value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
