"""Process sets: the processes that take part in a collective."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from gradring.errors import ConfigError, MismatchError
from gradring.group.communicator import Communicator
from gradring.horovod import basics
from gradring.horovod.negotiation import Call, differing, joined, negotiate

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]


class ProcessSet:
    """Some of the processes; `global_process_set` are all.

    Attributes:
        ranks: Of its processes, in the group of all, ascending; None for all processes.
        process_set_id: 0 for all processes, None for those that are not connected.

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
        """Names the processes; `add_process_set` or `init` connects them."""
        self.ranks = None if ranks is None else sorted(map(operator.index, ranks))
        self.process_set_id: int | None = 0 if ranks is None else None
        self._communicator: Communicator | None = None

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

    def _connect(self, communicator: Communicator) -> None:
        """Forms the group of its processes; all processes call it.

        Raises:
            ValueError: It has no ranks, or some twice, or some that do not exist.
            gradring.errors.ConfigError: It is connected already; or the job is elastic, whose ranks
                change.
            gradring.errors.MismatchError: Processes name different ranks, or one has joined; the
                group of all goes on.
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


#: All processes.
global_process_set = ProcessSet(None)


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Connects some processes; all processes call it, in the same order.

    Args:
        process_set: The processes, or their ranks.

    Returns:
        The process set, for ``process_set=`` of collectives, tape and optimizer. Different sets
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
    """Disconnects what `add_process_set` has connected; all processes call it.

    Args:
        process_set: The processes.

    Returns:
        Whether they were connected; all processes stay connected.

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
    """The communicator of the processes of a process set.

    Raises:
        gradring.errors.ConfigError: It is not connected, or this process is not in it.
    """
    if process_set.ranks is None:
        return basics.communicator()
    if process_set.process_set_id is None:
        raise ConfigError(f"{process_set} is not connected; call hvd.add_process_set() before")
    if process_set._communicator is None:
        raise ConfigError(f"rank {basics.rank()} is not in {process_set}; only its ranks call this")
    return process_set._communicator


def place_in(process_set: ProcessSet, root_rank: int) -> int:
    """The index in a process set of a rank among all processes.

    Raises:
        ValueError: It is not in it.
    """
    if process_set.ranks is None:
        return root_rank
    if root_rank not in process_set.ranks:
        raise ValueError(f"root_rank={root_rank!r} is not in {process_set}")
    return process_set.ranks.index(root_rank)
