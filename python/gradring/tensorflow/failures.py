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

    The exception is the one that TensorFlow raises too, a `tf.errors.DeadlineExceededError` when
    time ran out and a `tf.errors.AbortedError` otherwise, so that code written for either works.
    Errors that do not come from gradring pass unchanged.
    """
    try:
        yield
    except (tf.errors.AbortedError, tf.errors.DeadlineExceededError) as error:
        if isinstance(error, errors.GradringError):
            raise
        failure = _native.tensorflow_failure(error.message)
        if failure is None:
            raise
        kinds: Any = type(failure), type(error)
        raise _combined(*kinds)(error, failure) from error


@functools.cache
def _combined(exception: type[errors.GradringError], raised: Any) -> Any:
    """A class that is both gradring's `exception` and TensorFlow's `raised`."""

    def initialise(self: Any, error: Any, failure: errors.GradringError) -> None:
        raised.__init__(self, error.node_def, error.op, error.message)
        self.rank, self.host = failure.rank, failure.host
        self.collective, self.sequence = failure.collective, failure.sequence
        self.elapsed_s = failure.elapsed_s

    def text(self: Any) -> str:
        return str(self.message)

    return type(
        exception.__name__,
        (exception, raised),
        {"__init__": initialise, "__str__": text, "__module__": exception.__module__},
    )
