"""Training apart: the warning or error when ranks do not train one model together."""

from __future__ import annotations

import logging
from weakref import WeakSet

from gradring.errors import ConfigError
from gradring.group.communicator import Communicator

_log = logging.getLogger("gradring")

_strict: WeakSet[Communicator] = WeakSet()


def be_strict(communicator: Communicator) -> None:
    """Makes training apart an error, instead of a warning, in this group."""
    _strict.add(communicator)


def is_strict(communicator: Communicator) -> bool:
    """Returns whether training apart is an error in this group."""
    return communicator in _strict


def tell(communicator: Communicator, text: str) -> None:
    """Logs a warning on rank 0, or raises it as an error; every rank must call it.

    Raises:
        gradring.errors.ConfigError: On every rank, with the same text, if the group is strict.
    """
    rank, host = communicator.rank, communicator.host
    if is_strict(communicator):
        raise ConfigError(f"rank {rank} of {host}: {text}", rank=rank, host=host)
    if rank == 0:
        _log.warning("%s", text)
