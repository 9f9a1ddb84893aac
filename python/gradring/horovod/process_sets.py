"""Which processes take part in a collective."""

from __future__ import annotations

from collections.abc import Sequence

from gradring.communicator import Communicator
from gradring.errors import ConfigError
from gradring.horovod import basics


class ProcessSet:
    """Some of the processes; `global_process_set` are all.

    Attributes:
        ranks: Of its processes, in the group of all, ascending; None for all processes.
        process_set_id: 0 for all processes, None before `add_process_set`.
    """

    def __init__(self, ranks: Sequence[int] | None) -> None:
        """Names the processes; `add_process_set` connects them."""
        self.ranks = None if ranks is None else sorted(ranks)
        self.process_set_id: int | None = 0 if ranks is None else None

    def size(self) -> int:
        """How many processes it has."""
        return basics.size() if self.ranks is None else len(self.ranks)

    def rank(self) -> int | None:
        """This process's index in it; None if it is not in it."""
        if self.ranks is None:
            return basics.rank()
        return self.ranks.index(basics.rank()) if self.included() else None

    def included(self) -> bool:
        """Whether this process is in it."""
        return self.ranks is None or basics.rank() in self.ranks

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


#: All processes.
global_process_set = ProcessSet(None)


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Refuses: the processes of a part of the group cannot be connected yet.

    Args:
        process_set: The processes.

    Raises:
        gradring.errors.ConfigError: Always.
    """
    raise ConfigError(
        f"hvd.add_process_set({process_set!r}): gradring has no collectives of a part of the "
        "group; start these processes as a job of their own"
    )


def group_of(process_set: ProcessSet) -> Communicator:
    """The communicator of its processes.

    Raises:
        gradring.errors.ConfigError: It was not added.
    """
    if process_set.ranks is None:
        return basics.communicator()
    raise ConfigError(f"{process_set} is not connected; call hvd.add_process_set() before")
