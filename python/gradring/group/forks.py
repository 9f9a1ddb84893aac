"""Forks of a process with a rank: a forked child cannot use its parent's communicator."""

from __future__ import annotations

import mmap
import os
import socket
from typing import Any

from gradring.errors import ConfigError, GradringError

#: The ranks that ancestors of this process held when it was forked.
_of_ancestors: list[HeldRank] = []


class HeldRank:
    """A rank that this process holds until it leaves; forked processes see the state."""

    def __init__(self, rendezvous: str, rank: int) -> None:
        """Takes the rank."""
        self._name = (rendezvous, rank)
        #: Id of the process that holds the rank.
        self.process = os.getpid()
        # Shared memory: forked processes see when the rank is given up.
        try:
            self._taken = mmap.mmap(-1, 1)
        except OSError as error:
            raise ConfigError(
                f"rank {rank} on {socket.gethostname()} has no memory left ({error}); raise the "
                "limit of its process or container on memory",
                rank=rank,
            ) from error
        self._taken[0] = 1

    def leave(self) -> None:
        """Gives the rank up; does nothing in a forked process, which does not own it."""
        if self.process == os.getpid():
            self._taken[0] = 0

    def is_taken(self, rendezvous: str, rank: int) -> bool:
        """Returns True if this is the rank and its process is alive and has not left."""
        return self._name == (rendezvous, rank) and self._taken[0] == 1 and _lives(self.process)


def inherit(held: HeldRank) -> None:
    """Records, in a forked process, a rank that its parent holds."""
    _of_ancestors.append(held)


def check_not_held(rendezvous: str, rank: int) -> None:
    """Raises ConfigError if a process from which this one was forked holds the rank."""
    for held in _of_ancestors:
        if held.is_taken(rendezvous, rank):
            raise ConfigError(
                f"rank {rank} of the group at {rendezvous} is process {held.process}, from "
                f"which process {os.getpid()} was forked; use the communicator there, close it "
                "before the fork, or give this process its own group by other variables or "
                "arguments",
                rank=rank,
            )


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    return True


#: Names for messages, of native methods that have other public names.
_NAMES = {"run": "a collective", "start": "an asynchronous collective", "listen_beside": "split"}


class OfParent:
    """Replaces the native communicator in a forked child: closes silently, refuses other calls."""

    def __init__(self, rank: int, host: str) -> None:
        """Stores the parent's rank and host for messages."""
        self._rank, self._host = rank, host

    def abort(self, reason: str) -> None:
        """Does nothing: the parent's group continues."""

    def close(self) -> None:
        """Does nothing: the parent is still in the group."""

    def __getattr__(self, name: str) -> Any:
        """Refuses everything else."""
        raise GradringError(
            f"{_NAMES.get(name, name)} on rank {self._rank} on {self._host}: process "
            f"{os.getpid()} was forked from the one to which this communicator belongs; use it "
            "there only, or start this process with multiprocessing's spawn and give it a group of "
            "its own",
            rank=self._rank,
            host=self._host,
        )
