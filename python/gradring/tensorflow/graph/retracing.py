"""Graphs belong to a place in a group: rank and number of ranks are constants in them.

When an elastic job has given this process another place, each `tf.function` is traced anew at its
next call. When the place is one that it has had before, the graphs of that time serve again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any

from gradring.group.communicator import Communicator, at_new_group, core_of
from gradring.tensorflow.graph import compat

#: Rank and number of ranks in the beginning.
_first: weakref.WeakKeyDictionary[Communicator, tuple[int, int]] = weakref.WeakKeyDictionary()
#: The same now where they have changed, by what TensorFlow's graphs call the group.
_changed: dict[int, tuple[int, int]] = {}

#: By which TensorFlow is to find a graph among those of a function, beside its own reasons.
_reasons: dict[str, Callable[[], Hashable]] = {}


def watch(communicator: Communicator) -> None:
    """Has functions traced for the places in this group, from the present one on."""
    if communicator not in _first:
        _first[communicator] = communicator.rank, communicator.world_size
        at_new_group(communicator, _follow)


def _follow(communicator: Communicator) -> None:
    """The place may have changed."""
    place = communicator.rank, communicator.world_size
    _changed[core_of(communicator).id] = place
    if place == _first[communicator]:
        del _changed[core_of(communicator).id]
    trace_functions_for(frozenset(_changed.items()) or None)


def trace_functions_for(what: Hashable) -> None:
    """From now on, a `tf.function` runs a graph that was traced since this was said, or traces one.

    Args:
        what: None is what is said before anything is.
    """
    _trace_functions_by("for", lambda: what)


def trace_functions_apart_if(condition: Callable[[], bool]) -> None:
    """From now on, a `tf.function` has other graphs where the condition holds than elsewhere."""
    _trace_functions_by("apart", lambda: condition() or None)


def _trace_functions_by(name: str, reason: Callable[[], Hashable]) -> None:
    if not _reasons:
        compat.replace({"function_context.make_function_context": _with_reasons})
    _reasons[name] = reason


def _with_reasons(make_function_context: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    made = make_function_context(*args, **kwargs)
    found = {name: reason() for name, reason in _reasons.items()}
    given = frozenset((name, value) for name, value in found.items() if value is not None)
    return made._replace(context=(made.context, given)) if given else made
