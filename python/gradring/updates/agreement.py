"""All ranks have one rule, or none begins."""

from __future__ import annotations

from gradring.errors import ConfigError, MismatchError
from gradring.group.collectives import all_gather_bytes
from gradring.group.communicator import Communicator
from gradring.updates.rules import AllReduce, LocalSGD, ParameterServer, Primary, Rule


def agree(update: object, communicator: Communicator) -> Rule:
    """The rule, if all ranks have this one; every rank must call it.

    Raises:
        gradring.errors.ConfigError: It is no rule; nothing is sent then.
        gradring.errors.MismatchError: On every rank; names the first that has another rule than
            rank 0, and both rules.
    """
    if not isinstance(update, AllReduce | Primary | LocalSGD | ParameterServer):
        raise ConfigError(
            f"update={update!r} is no update rule; pass one of gradring.updates, or leave it out"
        )
    if communicator.world_size == 1:
        return update
    found = all_gather_bytes(communicator, repr(update).encode(), "update rule")
    rank = next((rank for rank, other in enumerate(found) if other != found[0]), 0)
    if rank:
        hosts = communicator.hosts
        raise MismatchError(
            f"{communicator._named(rank)} has update={found[rank].decode()}, and "
            f"{communicator._named(0)} update={found[0].decode()}; give every rank the same rule",
            rank=rank,
            host=hosts[rank],
        )
    return update
