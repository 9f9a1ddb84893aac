"""Second traces of functions whose graph TensorFlow refuses, without the order of `backward_order`.

That order is an optimisation. If a version of TensorFlow rewrites a graph so that the order creates
a cycle, training continues without the order. The collectives and their sequence stay the same, so
ranks need not agree about it.
"""

from __future__ import annotations

import logging
import re
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import tensorflow as tf

from gradring.tensorflow.graph import compat, retracing
from gradring.tensorflow.graph.context import holding

_logger = logging.getLogger("gradring")

#: Start of TensorFlow's error for a graph with a cycle.
_CYCLE = re.compile(r"\d+ nodes in a cycle")

_again: ContextVar[bool] = ContextVar("again", default=False)
_refused: weakref.WeakSet[Any] = weakref.WeakSet()
_first_ordered = ""
_installed = False


def is_tracing_again() -> bool:
    """Returns whether the current trace is the second one of a refused function."""
    return _again.get()


def note(operation: str) -> None:
    """Records that the current trace has the order, and prepares for its refusal.

    Args:
        operation: Name of an operation of the model behind a gate, for the log.
    """
    global _installed, _first_ordered
    _first_ordered = operation
    if not _installed:
        compat.replace({"Function.__call__": _call})
        retracing.trace_functions_apart_if(is_tracing_again)
        _installed = True


def _call(original: Callable[..., Any], function: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces `tf.function`'s `__call__`: traces again, without the order, after a refusal."""
    if function not in _refused:
        try:
            return original(function, *args, **kwargs)
        except tf.errors.InvalidArgumentError as error:
            if not tf.executing_eagerly() or not _CYCLE.match(error.message):
                raise
            _logger.warning(
                "TensorFlow refuses the graph of a function whose gradients are sent in the "
                "order of the backward pass, from the operation '%s' on (%s). It is traced again "
                "without that order: the results are equal, but less communication overlaps with "
                "computation",
                _first_ordered,
                error.message.partition("[")[0].strip(),
            )
            _refused.add(function)
    with holding(_again, True):
        return original(function, *args, **kwargs)
