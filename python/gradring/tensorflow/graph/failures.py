"""Conversion of TensorFlow's errors back to gradring's.

TensorFlow carries a failure through its runtime as a code and a message. It makes a Python
exception of them in many places, most of them in C++. All these places call the exception's class,
so the class is where errors of gradring are recognized, by the text of the message.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections import deque
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from gradring import _native
from gradring.errors import AbortedError, ConfigError, GradringError, PeerLostError

_FACTS = ("problem", "advice", "rank", "host", "collective", "sequence", "elapsed_s")

#: Word in all messages of gradring, and in the paths of its tracebacks.
_MARK = "gradring"

#: Start of TensorFlow's messages that show where in the program a graph's op was made.
_TRACE = "Graph execution error"
#: Errors that the blamed rank caused; no op of this rank's graph explains them.
_DONE_BY_A_RANK = (PeerLostError, AbortedError)

#: XLA's error for a graph with a collective; it names neither the collective nor the rank.
_REFUSED_BY_XLA = re.compile(r"No registered 'Gradring\w+' OpKernel for XLA")
_WITHOUT_XLA = (
    "a collective is inside code compiled with jit_compile=True, and XLA has no kernel for it: "
    "compile the forward and backward pass, and reduce outside of it; with Keras, "
    'compile(jit_compile=False), or "auto" under a strategy'
)

_installed = False
#: Errors of Python code inside an op, newest first. The core remembers errors of its own ops.
_remembered: deque[GradringError] = deque(maxlen=8)


def install() -> None:
    """Makes a failed collective raise gradring's exception, with all its facts.

    The exception is also of the class that TensorFlow raises, such as `tf.errors.AbortedError`, so
    code that catches either works. Errors from other sources do not change.
    """
    global _installed
    if not _installed:
        tf.errors.OpError.__new__ = _make
        _installed = True


@contextlib.contextmanager
def remembered() -> Iterator[None]:
    """Remembers gradring's errors in an op's Python code: TensorFlow passes on only their text."""
    try:
        yield
    except GradringError as error:
        _remembered.appendleft(error)
        raise


def failure_of(error: BaseException) -> GradringError | None:
    """Returns the exception of gradring behind another exception, or None.

    Args:
        error: The caught exception. It can be gradring's own, one of TensorFlow with gradring's
            message, or one that was raised from such an exception or while it was handled.

    Returns:
        An exception with the attributes of `gradring.errors.GradringError`; `error` itself if it
        is one.

    Examples:
        >>> try:
        ...     try:
        ...         gradring.tensorflow.all_reduce(tf.zeros([1 + rank]))
        ...     except tf.errors.OpError as error:
        ...         raise RuntimeError("step 7 failed") from error
        ... except RuntimeError as error:
        ...     failure = gradring.tensorflow.failure_of(error)
        >>> print(type(failure).__name__, "in", failure.collective)
        MismatchError in all_reduce(sum) 'all_reduce' float32[1]
    """
    following: list[BaseException] = [error]
    seen: set[int] = set()
    while following:
        candidate = following.pop(0)
        if isinstance(candidate, GradringError):
            behind = candidate.__context__
            # Keras raises a copy with a longer message and without the facts.
            if candidate.rank is None and type(behind) is type(candidate):
                return behind
            return candidate
        failure = _failure_in(str(candidate))
        if failure is not None:
            return failure
        seen.add(id(candidate))
        causes = [candidate.__cause__, candidate.__context__, *getattr(candidate, "exceptions", ())]
        following += [each for each in causes if each is not None and id(each) not in seen]
    return None


def _make(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces `tf.errors.OpError.__new__`; the arguments are those of `__init__`."""
    message = kwargs.get("message", args[2] if len(args) > 2 else "")
    failure = _failure_in(message)
    if failure is not None and not issubclass(cls, GradringError):
        kind: Any = type(failure)
        cls = _combined(kind, cls)
    if not issubclass(cls, GradringError):
        return Exception.__new__(cls)
    error = cls.kinds[0].__new__(cls)
    error.__dict__.update(_facts_of(failure or GradringError(message)))
    return error


def _facts_of(error: GradringError) -> dict[str, Any]:
    return {fact: getattr(error, fact, None) for fact in _FACTS}


def _failure_in(message: Any) -> GradringError | None:
    if not isinstance(message, str):
        return None
    if _REFUSED_BY_XLA.search(message):
        return ConfigError(_WITHOUT_XLA)
    if _MARK not in message:
        return None
    for error in _remembered:
        if str(error) in message:
            return error
    failure = _native.tensorflow_failure(message)
    if failure is not None and not isinstance(failure, GradringError):
        raise failure  # Ctrl-C during the lookup
    return failure


def _sentence_first(message: str) -> str:
    """Moves gradring's sentence in a message before TensorFlow's trace of about sixty lines.

    The trace is left out if the error blames a rank that ended or aborted, because then no op of
    this graph is at fault.
    """
    if _REFUSED_BY_XLA.search(message):
        # TensorFlow puts the trace before a message that already begins with the sentence.
        return f"{_WITHOUT_XLA}\n\n{message.replace(_WITHOUT_XLA, '').lstrip()}"
    failure = _failure_in(message) if message.startswith(_TRACE) else None
    trace, sentence, rest = message.partition(f"{type(failure).__name__}: {failure}")
    if not sentence:
        return message
    if isinstance(failure, _DONE_BY_A_RANK) and failure.rank is not None:
        return f"gradring {sentence}{rest}"
    return f"gradring {sentence}{rest}\n\n{trace.removesuffix('gradring ').rstrip()}"


def _set_message(error: Any, message: str) -> None:
    """Setter of the message attribute: TensorFlow sets it again when it has found the trace."""
    error.__dict__["_message"] = _sentence_first(message)


class _Named(type):
    """Metaclass of a class whose name in Python differs from the name that C++ sees.

    pybind11, between TensorFlow and Python, treats it as a bug if the exception that it raises has
    a class of another name than it asked for.
    """

    @property
    def __name__(cls) -> str:  # type: ignore[override]
        return cls.__qualname__


@functools.cache
def _combined(kind: Any, raised: Any) -> Any:
    """Makes a class that is both gradring's `kind` and TensorFlow's `raised`."""
    members = {
        "__new__": _make,
        "__init__": raised.__init__,
        "_message": property(lambda error: error.__dict__["_message"], _set_message),
        "__str__": raised.__str__,
        "__reduce__": _reduce,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "kinds": (kind, raised),
    }
    return _Named(raised.__name__, (kind, raised), members)


def _reduce(error: Any) -> Any:
    return as_both, (*error.kinds, error.message, _facts_of(error))


def like(error: GradringError, raised: Any) -> Any:
    """Makes an exception with the text and facts of `error` that is also TensorFlow's `raised`."""
    return as_both(type(error), raised, str(error), _facts_of(error))


def as_both(kind: Any, raised: Any, message: str, facts: dict[str, Any]) -> Any:
    """Makes an exception that is both gradring's `kind` and TensorFlow's `raised`.

    Args:
        kind: A class of `gradring.errors`.
        raised: A class of `tf.errors`.
        message: Text of the exception. No remembered error is looked up by it.
        facts: Attributes of `GradringError`; missing ones are unknown.
    """
    cls = _combined(kind, raised)
    error = kind.__new__(cls)
    cls.__init__(error, None, None, message)
    error.__dict__.update(_facts_of(kind(message)) | facts)
    return error
