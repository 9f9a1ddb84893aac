"""The registry of this process's open groups and their uses."""

from __future__ import annotations

import os
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from gradring.clusters import Cluster
from gradring.config.settings import GROUP, variables
from gradring.config.values import Settings
from gradring.errors import ConfigError

#: Settings that a group keeps until its end, with their environment variables.
_VARIABLES = {
    name: variables(name)
    for name in ("token", "tls", "interface", *(setting.name for setting in GROUP))
    if name != "timeout"
}


def _texts() -> dict[str, list[str | None]]:
    return {name: list(map(os.environ.get, _VARIABLES[name])) for name in _VARIABLES}


@dataclass(frozen=True)
class Membership:
    """The cluster and settings with which `init` joined a group.

    Attributes:
        cluster: The group and the place in it.
        settings: Settings with which the group formed.
        joins: Addresses of a running job's members that this process must join first.
        texts: Values of the environment variables at that time.
    """

    cluster: Cluster
    settings: Settings
    joins: Sequence[str] = ()
    texts: Mapping[str, list[str | None]] = field(default_factory=_texts)

    def is_of(self, cluster: Cluster) -> bool:
        """Returns True if `cluster` means the same rank of the same group."""
        mine = self.cluster
        same_job = cluster.job_id in (None, mine.job_id) or mine.job_id is None
        return same_job and (mine.rank, mine.world_size, mine.rendezvous) == (
            cluster.rank,
            cluster.world_size,
            cluster.rendezvous,
        )

    def check(self, asked: Settings, given: Collection[str]) -> None:
        """Refuses settings that differ from the group's.

        Args:
            asked: All settings, defaults included.
            given: Names of settings passed as arguments; other settings count if their variable has
                changed.

        Raises:
            ConfigError: A setting differs; the message names it.
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


class Group(Protocol):
    """The part of a `Communicator` that the registry uses."""

    generation: int

    def __hash__(self) -> int:
        """Hashes by identity."""


G = TypeVar("G", bound=Group)


@dataclass(eq=False)
class Use(Generic[G]):
    """The use of an open group in this process.

    Attributes:
        membership: Arguments of the `init` call that joined it; None for a group made without
            `init`.
        users: Number of `init` calls that returned it, each with a `close` of its own.
        kept: The group itself, if it must not be collected before it is closed; see
            `OpenGroups.keep`.
        is_stand_in: True if the program did not ask for the group: a strategy made it for its own
            use.
    """

    membership: Membership | None = None
    users: int = 1
    kept: G | None = None
    is_stand_in: bool = False


class OpenGroups(Generic[G]):
    """Weak references to this process's groups that are not closed."""

    def __init__(self) -> None:
        """Begins empty."""
        self._uses: weakref.WeakKeyDictionary[G, Use[G]] = weakref.WeakKeyDictionary()

    def add(self, group: G) -> None:
        """Adds a group as open."""
        self._uses[group] = Use()

    def remove(self, group: G) -> None:
        """Removes a closed group; does nothing if it was removed before."""
        self._uses.pop(group, None)

    def __iter__(self) -> Iterator[G]:
        """Iterates over a copy in no particular order."""
        return iter(list(self._uses))

    def __contains__(self, group: G) -> bool:
        """Returns True until the group is closed."""
        return group in self._uses

    def unnamed(self) -> list[G]:
        """Returns the groups for calls that name none: a stand-in only if there is no other."""
        return [group for group in self if not self.use_of(group).is_stand_in] or list(self)

    def use_of(self, group: G) -> Use[G]:
        """Returns the use of an open group, or an unused `Use` for a closed one."""
        return self._uses.get(group, Use())

    def let_go(self, group: G) -> bool:
        """Returns True for the last user of a group; otherwise removes one user."""
        use = self.use_of(group)
        if use.users == 1:
            return True
        use.users -= 1
        return False

    def yet_to_join(self, group: G) -> Sequence[str]:
        """Returns the addresses of a running job that this process has not joined yet."""
        membership = self.use_of(group).membership
        return membership.joins if membership is not None and group.generation == 0 else ()

    def keep(self, group: G) -> None:
        """Keeps a group alive until it is closed, even after its strategy is collected.

        Ranks collect garbage at different times. A rank without the group that makes another
        strategy would form a new group and wait for ranks that still use the old one.
        """
        self.use_of(group).kept = group

    def kept(self) -> list[G]:
        """Returns the open groups that `keep` was called for."""
        return [group for group in self if self.use_of(group).kept is not None]
