"""New traces when the process gets another place: graphs contain rank and world size as constants.

When an elastic job has given this process another rank or world size, the next call of each
`tf.function` traces it anew. If the process had the same place before, the graphs from that time
are used again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any

from gradring.group.communicator import Communicator, at_new_group, core_of
from gradring.tensorflow.graph import compat

#: Rank and world size when the communicator was first watched.
_first: weakref.WeakKeyDictionary[Communicator, tuple[int, int]] = weakref.WeakKeyDictionary()
#: Current rank and world size if they have changed, by the group's number in graphs.
_changed: dict[int, tuple[int, int]] = {}

#: Further keys of TensorFlow's cache of a function's graphs, by name.
_reasons: dict[str, Callable[[], Hashable]] = {}


def watch(communicator: Communicator) -> None:
    """Makes functions be traced for each place of this process in the group."""
    if communicator not in _first:
        _first[communicator] = communicator.rank, communicator.world_size
        at_new_group(communicator, _follow)


def _follow(communicator: Communicator) -> None:
    """Updates the cache key when a new group has formed: the place may have changed."""
    place = communicator.rank, communicator.world_size
    _changed[core_of(communicator).id] = place
    if place == _first[communicator]:
        del _changed[core_of(communicator).id]
    trace_functions_for(frozenset(_changed.items()) or None)


def trace_functions_for(key: Hashable) -> None:
    """Makes each `tf.function` run only graphs that it traced under an equal key.

    Args:
        key: The key. None, the key at the start of the process, adds nothing to TensorFlow's own.
    """
    _trace_functions_by("for", lambda: key)


def trace_functions_apart_if(condition: Callable[[], bool]) -> None:
    """Separates graphs that a `tf.function` traces while the condition holds from all others."""
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
