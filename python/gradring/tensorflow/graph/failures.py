"""From TensorFlow's errors back to gradring's.

TensorFlow carries a failure through its runtime as a code and a message, and makes a Python
exception of them in many places, most of them in C++. All of them call the class of the exception,
so that is where the errors of gradring are told apart, by the words of the message.
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

#: Without it a message is none of gradring's: in all of them, and in paths of its tracebacks.
_MARK = "gradring"

#: How TensorFlow begins a message that says where in the program a graph's op was made.
_TRACE = "Graph execution error"
#: With a rank to blame, they come from what it did: no op of this rank's graph explains them.
_DONE_BY_A_RANK = (PeerLostError, AbortedError)

#: How XLA refuses a graph with a collective; the message names neither that nor the rank.
_REFUSED_BY_XLA = re.compile(r"No registered 'Gradring\w+' OpKernel for XLA")
_WITHOUT_XLA = (
    "a collective is inside code compiled with jit_compile=True, and XLA has no kernel for it: "
    "compile the forward and backward pass, and reduce outside of it; with Keras, "
    'compile(jit_compile=False), or "auto" under a strategy'
)

_installed = False
#: Of Python code inside an op, newest first. The core remembers those of its own ops.
_remembered: deque[GradringError] = deque(maxlen=8)


def install() -> None:
    """From now on, a failed collective raises gradring's exception, with all its facts.

    The exception is the one that TensorFlow raises too, such as `tf.errors.AbortedError`, so that
    code written for either works. Errors that do not come from gradring are made as ever.
    """
    global _installed
    if not _installed:
        tf.errors.OpError.__new__ = _make
        _installed = True


@contextlib.contextmanager
def remembered() -> Iterator[None]:
    """For Python code inside an op, of whose errors TensorFlow passes on the words alone."""
    try:
        yield
    except GradringError as error:
        _remembered.appendleft(error)
        raise


def failure_of(error: BaseException) -> GradringError | None:
    """The exception of gradring behind another one, or None.

    Args:
        error: What was caught: an exception of gradring; one of TensorFlow that carries its
            message; or one that was raised because of such an exception, or while it was handled.

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
            # Keras makes another one like it, with more words and without the facts.
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
    """In place of `tf.errors.OpError.__new__`; the arguments are those of `__init__`."""
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
        raise failure  # Ctrl-C that came meanwhile
    return failure


def _sentence_first(message: str) -> str:
    """The message with gradring's sentence before TensorFlow's trace of some sixty lines.

    The trace is left out where a rank has ended or aborted, and no call may be wrong.
    """
    if _REFUSED_BY_XLA.search(message):
        # The trace comes before a message that had the sentence already.
        return f"{_WITHOUT_XLA}\n\n{message.replace(_WITHOUT_XLA, '').lstrip()}"
    failure = _failure_in(message) if message.startswith(_TRACE) else None
    trace, sentence, rest = message.partition(f"{type(failure).__name__}: {failure}")
    if not sentence:
        return message
    if isinstance(failure, _DONE_BY_A_RANK) and failure.rank is not None:
        return f"gradring {sentence}{rest}"
    return f"gradring {sentence}{rest}\n\n{trace.removesuffix('gradring ').rstrip()}"


def _set_message(error: Any, message: str) -> None:
    """In place of the attribute, which TensorFlow sets again when it has found the trace."""
    error.__dict__["_message"] = _sentence_first(message)


class _Named(type):
    """The class of a class that tells another name than the one that C++ sees.

    pybind11, between TensorFlow and Python, takes it for a fault if an exception that it raises
    turns out to be of a class of another name.
    """

    @property
    def __name__(cls) -> str:  # type: ignore[override]
        return cls.__qualname__


@functools.cache
def _combined(kind: Any, raised: Any) -> Any:
    """A class that is both gradring's `kind` and TensorFlow's `raised`."""
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
    """An exception that says what this one does, and is TensorFlow's `raised` too."""
    return as_both(type(error), raised, str(error), _facts_of(error))


def as_both(kind: Any, raised: Any, message: str, facts: dict[str, Any]) -> Any:
    """An exception that is gradring's `kind` and TensorFlow's `raised`.

    Args:
        kind: A class of `gradring.errors`.
        raised: A class of `tf.errors`.
        message: Whatever it says: nothing is looked up by it.
        facts: Attributes of `GradringError`; those that are left out are not known.
    """
    cls = _combined(kind, raised)
    error = kind.__new__(cls)
    cls.__init__(error, None, None, message)
    error.__dict__.update(_facts_of(kind(message)) | facts)
    return error
