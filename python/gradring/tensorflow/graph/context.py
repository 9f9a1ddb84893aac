"""Values of context variables inside a block, in the thread that runs the block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


@contextlib.contextmanager
def holding(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Sets the variable to this value while the block runs."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
