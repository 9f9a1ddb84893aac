"""From TensorFlow's errors back to gradring's."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from gradring import errors

_EXCEPTION = re.compile(r"gradring (\w+Error): ")
_BLAMED = re.compile(r"\brank (\d+) on ([^\s:]+)")


@contextlib.contextmanager
def typed_errors() -> Iterator[None]:
    """Inside, a failed collective raises gradring's exception.

    The exception is a `tf.errors.AbortedError` too, so that code written for either works. Errors
    that do not come from gradring pass unchanged.
    """
    try:
        yield
    except tf.errors.AbortedError as error:
        typed = _typed(error)
        if typed is None:
            raise
        raise typed from error


def _typed(error: Any) -> BaseException | None:
    if isinstance(error, errors.GradringError):
        return None
    found = _EXCEPTION.search(error.message)
    exception = getattr(errors, found[1], None) if found else None
    if exception is None:
        return None
    typed: Any = _combined(exception)(error)
    blamed = _BLAMED.search(error.message)
    if blamed:
        typed.rank, typed.host = int(blamed[1]), blamed[2]
    return typed  # type: ignore[no-any-return]


@functools.cache
def _combined(exception: type[BaseException]) -> type[BaseException]:
    """A class that is both `exception` and `tf.errors.AbortedError`."""

    def initialise(self: Any, error: Any) -> None:
        tf.errors.AbortedError.__init__(self, error.node_def, error.op, error.message)

    def text(self: Any) -> str:
        return str(self.message)

    return type(
        exception.__name__,
        (exception, tf.errors.AbortedError),
        {"__init__": initialise, "__str__": text, "__module__": exception.__module__},
    )
