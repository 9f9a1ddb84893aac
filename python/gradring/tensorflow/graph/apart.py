"""Training apart: what is said, or refused, where ranks do not train one model together."""

from __future__ import annotations

import logging
from weakref import WeakSet

from gradring.errors import ConfigError
from gradring.group.communicator import Communicator

_log = logging.getLogger("gradring")

_strict: WeakSet[Communicator] = WeakSet()


def be_strict(communicator: Communicator) -> None:
    """From now on, training apart is an error in this group."""
    _strict.add(communicator)


def is_strict(communicator: Communicator) -> bool:
    """Whether training apart is an error in this group."""
    return communicator in _strict


def tell(communicator: Communicator, text: str) -> None:
    """Says on rank 0 what all ranks have found.

    Raises:
        gradring.errors.ConfigError: On every rank, in a group of a strict strategy.
    """
    rank, host = communicator.rank, communicator.host
    if is_strict(communicator):
        raise ConfigError(f"rank {rank} of {host}: {text}", rank=rank, host=host)
    if rank == 0:
        _log.warning("%s", text)
