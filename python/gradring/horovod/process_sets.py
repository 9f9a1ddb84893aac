"""Process sets: subsets of the processes, for collectives."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from gradring.errors import ConfigError, MismatchError
from gradring.group.communicator import Communicator
from gradring.horovod import basics
from gradring.horovod.negotiation import Call, differing, joined, negotiate

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]


class ProcessSet:
    """A subset of the processes; `global_process_set` has all.

    Attributes:
        ranks: Ranks of its processes in the group of all, ascending; None for all processes.
        process_set_id: Number of the set, 0 for all processes; None if it is not connected.

    Examples:
        >>> first = hvd.ProcessSet([0])
        >>> first.ranks, first.process_set_id
        ([0], None)
        >>> hvd.add_process_set(first)
        ProcessSet(process_set_id=1, ranks=[0])
        >>> first.included(), first.rank(), first.size()
        (True, 0, 1)
        >>> if first.included():
        ...     float(hvd.allreduce(5.0, op=hvd.Sum, process_set=first))
        5.0
    """

    def __init__(self, ranks: Sequence[int] | None) -> None:
        """Takes the ranks; `add_process_set` or `init` connects the processes."""
        self.ranks = None if ranks is None else sorted(map(operator.index, ranks))
        self.process_set_id: int | None = 0 if ranks is None else None
        self._communicator: Communicator | None = None

    def size(self) -> int:
        """Returns the number of its processes."""
        return basics.size() if self.ranks is None else len(self.ranks)

    def rank(self) -> int | None:
        """Returns this process's index in the set; None if it is not a member."""
        if self.ranks is None:
            return basics.rank()
        return self.ranks.index(basics.rank()) if self.included() else None

    def included(self) -> bool:
        """Returns True if this process is a member."""
        return self.ranks is None or basics.rank() in self.ranks

    def _connect(self, communicator: Communicator) -> None:
        """Forms the group of its processes; all processes must call it.

        Raises:
            ValueError: The set has no ranks, a rank twice, or a rank that does not exist.
            gradring.errors.ConfigError: The set is already connected; or the job is elastic, so its
                ranks change.
            gradring.errors.MismatchError: Processes pass different ranks, or one has called `join`;
                the group of all stays usable.
        """
        ranks, own = self.ranks, communicator.rank
        if ranks is None or self.process_set_id is not None:
            raise ConfigError(f"{self} is connected already")
        if not ranks or len(set(ranks)) < len(ranks) or set(ranks) - set(range(basics.size())):
            raise ValueError(f"{self}: give different ranks below {basics.size()}")
        calls = negotiate(communicator, Call("add_process_set", how=str(ranks)))
        pair = differing(calls)
        if pair is not None:
            raise MismatchError(
                f"rank {pair[0]} calls {calls[pair[0]]}, and rank {pair[1]} calls {calls[pair[1]]}",
                rank=pair[1],
                host=communicator.hosts[pair[1]],
            )
        absent = joined(calls)
        if absent:
            raise MismatchError(
                f"rank {absent[0]} has called join(), and cannot take part in {calls[own]}",
                advice="connect process sets while all ranks have data",
                rank=absent[0],
                host=communicator.hosts[absent[0]],
            )
        color = 0 if self.included() else None
        self._communicator = communicator.split(
            color, own, name=f"the process set of ranks {ranks}"
        )
        self.process_set_id = basics.keep(self)

    def _disconnect(self) -> None:
        """Closes the group of its processes."""
        if self._communicator is not None:
            self._communicator.close()
        self._communicator, self.process_set_id = None, None

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


global_process_set = ProcessSet(None)
"""The set of all processes."""


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Connects a process set; all processes must call it in the same order.

    Args:
        process_set: The process set, or its ranks.

    Returns:
        The process set, for ``process_set=`` of collectives, tape and optimizer. Different sets can
        work at the same time.

    Examples:
        >>> alone = [hvd.add_process_set([rank]) for rank in range(hvd.size())]
        >>> own = alone[hvd.rank()]
        >>> hvd.allgather([10 * hvd.rank()], process_set=own).numpy()
        array([0], dtype=int32)
    """
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    added._connect(basics.communicator())
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Disconnects a process set; all processes must call it.

    Args:
        process_set: The process set.

    Returns:
        True if it was connected; False also for `global_process_set`, which stays connected.

    Examples:
        >>> first = hvd.add_process_set([0])
        >>> hvd.remove_process_set(first)
        True
        >>> hvd.remove_process_set(hvd.global_process_set)
        False
    """
    was_connected = process_set.ranks is not None and process_set.process_set_id is not None
    if was_connected:
        process_set._disconnect()
    return was_connected


def communicator_of(process_set: ProcessSet) -> Communicator:
    """Returns the communicator of a process set.

    Raises:
        gradring.errors.ConfigError: The set is not connected, or this process is not a member.
    """
    if process_set.ranks is None:
        return basics.communicator()
    if process_set.process_set_id is None:
        raise ConfigError(f"{process_set} is not connected; call hvd.add_process_set() before")
    if process_set._communicator is None:
        raise ConfigError(f"rank {basics.rank()} is not in {process_set}; only its ranks call this")
    return process_set._communicator


def place_in(process_set: ProcessSet, root_rank: int) -> int:
    """Converts a rank among all processes to an index in a process set.

    Raises:
        ValueError: The rank is not a member.
    """
    if process_set.ranks is None:
        return root_rank
    if root_rank not in process_set.ranks:
        raise ValueError(f"root_rank={root_rank!r} is not in {process_set}")
    return process_set.ranks.index(root_rank)
