"""Groups that have done nothing together: said at their end, as their ranks are likeliest apart.

A program may form a group and then compute by something that knows nothing of it. Nothing fails
then, and each rank does the whole work.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from weakref import WeakKeyDictionary

from gradring.config.words import counted
from gradring.group.communicator import Communicator, core_of, program_error

_log = logging.getLogger("gradring")

#: Collectives by which a strategy has compared itself on all ranks.
_of_forming: WeakKeyDictionary[Communicator, int] = WeakKeyDictionary()


def note_formed(communicator: Communicator) -> None:
    """What the group has done until now was only to form."""
    _of_forming[communicator] = _done(communicator)


@contextlib.contextmanager
def told(communicator: Communicator) -> Iterator[None]:
    """Says on rank 0, before the block closes a group of several ranks, that it was not used."""
    if communicator.rank == 0 and communicator.world_size > 1 and _is_idle(communicator):
        _log.warning(
            "%s formed a group and did no collective in it: each did all of its work alone. To "
            "train together, train in a strategy, reduce gradients by a GradientReducer, or start "
            "a script that knows of no ranks by `gradring run --with-strategy`",
            counted(communicator.world_size, "rank"),
        )
    yield


def _is_idle(communicator: Communicator) -> bool:
    # The groups of an elastic job come and go, and count anew.
    is_elastic = communicator.generation > 0
    if is_elastic or core_of(communicator).has_failed or program_error() is not None:
        return False
    return _done(communicator) <= _of_forming.get(communicator, 0)


def _done(communicator: Communicator) -> int:
    return int(core_of(communicator).stats()["count"])
