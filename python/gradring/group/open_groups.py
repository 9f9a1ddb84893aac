"""The groups that this process is in: who asks for one of them again gets it, and no second one."""

from __future__ import annotations

import os
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from gradring.clusters import Cluster
from gradring.config.settings import GROUP, variables
from gradring.config.values import Settings
from gradring.errors import ConfigError
from gradring.group.communicator import Communicator, core_of, open_communicators

#: The settings that a group keeps until its end, and the variables that say them.
_VARIABLES = {
    name: variables(name)
    for name in ("token", "tls", "interface", *(setting.name for setting in GROUP))
    if name != "timeout"
}


def _texts() -> dict[str, list[str | None]]:
    return {name: list(map(os.environ.get, _VARIABLES[name])) for name in _VARIABLES}


@dataclass(frozen=True)
class Membership:
    """How this process came into a group.

    Attributes:
        cluster: The group and the place in it.
        settings: With which it formed.
        texts: What the variables said then.
    """

    cluster: Cluster
    settings: Settings
    texts: Mapping[str, list[str | None]] = field(default_factory=_texts)

    def is_of(self, cluster: Cluster) -> bool:
        """Whether it is this place in this group."""
        mine = self.cluster
        same_job = cluster.job_id in (None, mine.job_id) or mine.job_id is None
        return same_job and (mine.rank, mine.world_size, mine.rendezvous) == (
            cluster.rank,
            cluster.world_size,
            cluster.rendezvous,
        )

    def check(self, asked: Settings, given: Collection[str]) -> None:
        """Refuses settings that the group does not have.

        Args:
            asked: All settings, also those that were not asked for.
            given: Names of the arguments among them; a variable counts if it has changed.

        Raises:
            ConfigError: One differs; names it.
        """
        now = _texts()
        for name in _VARIABLES:
            had, wanted = getattr(self.settings, name), getattr(asked, name)
            if had != wanted and (name in given or now[name] != self.texts[name]):
                values = "another token" if name == "token" else f"{name}={wanted!r}, not {had!r}"
                raise ConfigError(
                    f"rank {self.cluster.rank} of {self.cluster.world_size} is in the group at "
                    f"{self.cluster.rendezvous} already, and is asked to join it with {values}; "
                    "give all the same settings, close() the communicator before, or form another "
                    "group at another rendezvous",
                    rank=self.cluster.rank,
                )


#: The groups that `init` has joined, and how.
_joined: weakref.WeakKeyDictionary[Communicator, Membership] = weakref.WeakKeyDictionary()
#: The groups of strategies and ops, as long as they are open.
_kept: set[Communicator] = set()


def remember(communicator: Communicator, membership: Membership) -> None:
    """Notes how this process came into a group."""
    _joined[communicator] = membership


def existing(cluster: Cluster) -> tuple[Membership, Communicator] | None:
    """The open communicator of this place; one that has failed is closed and does not count."""
    for communicator in open_communicators():
        membership = _joined.get(communicator)
        if membership is not None and membership.is_of(cluster):
            if not core_of(communicator).has_failed:
                return membership, communicator
            communicator._users = 1
            communicator.close()
    return None


def keep(communicator: Communicator) -> None:
    """Keeps a communicator until it is closed, though its strategy may be gone before.

    Ranks collect garbage at different times. One that had lost the group, and makes another
    strategy, would wait for ranks that still have it.
    """
    _kept.intersection_update(open_communicators())
    _kept.add(communicator)


def kept() -> list[Communicator]:
    """The communicators that `keep` was told of and that are still open."""
    return [communicator for communicator in open_communicators() if communicator in _kept]
