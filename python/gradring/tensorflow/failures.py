"""From TensorFlow's errors back to gradring's."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from gradring import _native, errors


@contextlib.contextmanager
def typed_errors() -> Iterator[None]:
    """Inside, a failed collective raises gradring's exception, with all its facts.

    The exception is a `tf.errors.AbortedError` too, so that code written for either works. Errors
    that do not come from gradring pass unchanged.
    """
    try:
        yield
    except tf.errors.AbortedError as error:
        if isinstance(error, errors.GradringError):
            raise
        failure = _native.tensorflow_failure(error.message)
        if failure is None:
            raise
        kind: Any = type(failure)
        raise _combined(kind)(error, failure) from error


@functools.cache
def _combined(exception: type[errors.GradringError]) -> Any:
    """A class that is both `exception` and `tf.errors.AbortedError`."""

    def initialise(self: Any, error: Any, failure: errors.GradringError) -> None:
        tf.errors.AbortedError.__init__(self, error.node_def, error.op, error.message)
        self.rank, self.host = failure.rank, failure.host
        self.collective, self.sequence = failure.collective, failure.sequence
        self.elapsed_s = failure.elapsed_s

    def text(self: Any) -> str:
        return str(self.message)

    return type(
        exception.__name__,
        (exception, tf.errors.AbortedError),
        {"__init__": initialise, "__str__": text, "__module__": exception.__module__},
    )
