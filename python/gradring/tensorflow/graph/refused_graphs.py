"""Functions whose graph TensorFlow refuses are traced again, without the order of `backward_order`.

That order is an optimisation. If a version of TensorFlow rewrites a graph so that the order makes a
cycle of it, training goes on without it. What is sent, and in which order, is the same: ranks need
not agree about it.
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

#: How TensorFlow begins to say that it cannot order a graph.
_CYCLE = re.compile(r"\d+ nodes in a cycle")

_again: ContextVar[bool] = ContextVar("again", default=False)
_refused: weakref.WeakSet[Any] = weakref.WeakSet()
_first_ordered = ""
_installed = False


def is_tracing_again() -> bool:
    """Whether what is traced now was refused before."""
    return _again.get()


def note(operation: str) -> None:
    """A graph that is being traced has the order, from this operation of the model on."""
    global _installed, _first_ordered
    _first_ordered = operation
    if not _installed:
        compat.replace({"Function.__call__": _call})
        retracing.trace_functions_apart_if(is_tracing_again)
        _installed = True


def _call(original: Callable[..., Any], function: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of `tf.function`'s `__call__`."""
    if function not in _refused:
        try:
            return original(function, *args, **kwargs)
        except tf.errors.InvalidArgumentError as error:
            if not tf.executing_eagerly() or not _CYCLE.match(error.message):
                raise
            _logger.warning(
                "TensorFlow refuses the graph of a function whose gradients are sent in the "
                "order of the backward pass, from the operation '%s' on (%s); it is traced "
                "again without that order: the results are the same, and less of the "
                "communication is hidden behind computing",
                _first_ordered,
                error.message.partition("[")[0].strip(),
            )
            _refused.add(function)
    with holding(_again, True):
        return original(function, *args, **kwargs)
