"""Graphs belong to a place in a group: rank and number of ranks are constants in them.

When an elastic job has given this process another place, each `tf.function` is traced anew at its
next call. When the place is one that it has had before, the graphs of that time serve again.
"""

from __future__ import annotations

import weakref

from gradring.group.communicator import Communicator, at_new_group, core_of
from gradring.tensorflow.graph import compat

#: Rank and number of ranks in the beginning.
_first: weakref.WeakKeyDictionary[Communicator, tuple[int, int]] = weakref.WeakKeyDictionary()
#: The same now where they have changed, by what TensorFlow's graphs call the group.
_changed: dict[int, tuple[int, int]] = {}


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
    compat.trace_functions_for(frozenset(_changed.items()) or None)
