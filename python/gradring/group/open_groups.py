"""The registry of the groups that this process is in, and what each is used for."""

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
        joins: Where members of a running job listen that it is to join first.
        texts: What the variables said then.
    """

    cluster: Cluster
    settings: Settings
    joins: Sequence[str] = ()
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


class Group(Protocol):
    """What the registry needs of a `Communicator`."""

    generation: int

    def __hash__(self) -> int:
        """By identity."""


G = TypeVar("G", bound=Group)


@dataclass(eq=False)
class Use(Generic[G]):
    """What this process has an open group for.

    Attributes:
        membership: How `init` has joined it; None for a group that was made otherwise.
        users: Those to whom `init` gave it, each of whom closes it.
        kept: The group itself, where it has to stay until it is closed; see `OpenGroups.keep`.
        is_stand_in: Whether the program has not asked for it: a strategy has it in place of one.
    """

    membership: Membership | None = None
    users: int = 1
    kept: G | None = None
    is_stand_in: bool = False


class OpenGroups(Generic[G]):
    """The groups of this process that have not been closed; those that nobody has are not in it."""

    def __init__(self) -> None:
        """Begins without any."""
        self._uses: weakref.WeakKeyDictionary[G, Use[G]] = weakref.WeakKeyDictionary()

    def add(self, group: G) -> None:
        """Takes a group for open."""
        self._uses[group] = Use()

    def remove(self, group: G) -> None:
        """Takes a group for closed; it may be already."""
        self._uses.pop(group, None)

    def __iter__(self) -> Iterator[G]:
        """In no particular order; others may be added and removed meanwhile."""
        return iter(list(self._uses))

    def __contains__(self, group: G) -> bool:
        """Whether nobody has closed it."""
        return group in self._uses

    def unnamed(self) -> list[G]:
        """Those that a call may mean that names none: a stand-in only where there is no other."""
        return [group for group in self if not self.use_of(group).is_stand_in] or list(self)

    def use_of(self, group: G) -> Use[G]:
        """What an open group is used for; one that is closed, for nothing."""
        return self._uses.get(group, Use())

    def let_go(self, group: G) -> bool:
        """Whether the one that closes a group is its last user; otherwise there is one less."""
        use = self.use_of(group)
        if use.users == 1:
            return True
        use.users -= 1
        return False

    def yet_to_join(self, group: G) -> Sequence[str]:
        """Where members of a running job listen that this process has yet to join."""
        membership = self.use_of(group).membership
        return membership.joins if membership is not None and group.generation == 0 else ()

    def keep(self, group: G) -> None:
        """Keeps a group until it is closed, though its strategy may be gone before.

        Ranks collect garbage at different times. One that had lost the group, and makes another
        strategy, would wait for ranks that still have it.
        """
        self.use_of(group).kept = group

    def kept(self) -> list[G]:
        """The groups that `keep` was told of and that are still open."""
        return [group for group in self if self.use_of(group).kept is not None]
