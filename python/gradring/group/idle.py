"""A warning at the end of groups that ran no collective, since each rank probably trained alone.

A program can form a group and then train with code that does not use it. Nothing fails then, but
each rank does the whole work.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from weakref import WeakKeyDictionary

from gradring.config.words import counted
from gradring.group.communicator import Communicator, core_of, program_error

_log = logging.getLogger("gradring")

#: Number of collectives by which a strategy compared its settings on all ranks.
_of_forming: WeakKeyDictionary[Communicator, int] = WeakKeyDictionary()


def note_formed(communicator: Communicator) -> None:
    """Records the collectives so far as part of forming, which do not count as use."""
    _of_forming[communicator] = _done(communicator)


@contextlib.contextmanager
def warns(communicator: Communicator) -> Iterator[None]:
    """Warns on rank 0 before the block, which closes a group, if the group was not used."""
    if communicator.rank == 0 and communicator.world_size > 1 and _is_idle(communicator):
        _log.warning(
            "%s formed a group and did no collective in it: each did all of its work alone. To "
            "train together, train in a strategy, reduce gradients by a GradientReducer, or start "
            "a script that knows of no ranks by `gradring run --with-strategy`",
            counted(communicator.world_size, "rank"),
        )
    yield


def _is_idle(communicator: Communicator) -> bool:
    # Each next group of an elastic job counts from 0, so a small count proves nothing.
    is_elastic = communicator.generation > 0
    if is_elastic or core_of(communicator).has_failed or program_error() is not None:
        return False
    return _done(communicator) <= _of_forming.get(communicator, 0)


def _done(communicator: Communicator) -> int:
    return int(core_of(communicator).stats()["count"])
