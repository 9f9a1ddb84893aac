"""Ranks and forks: in a forked child a communicator is still its parent's, and of no use."""

from __future__ import annotations

import mmap
import os
import socket
from typing import Any

from gradring.errors import ConfigError, GradringError

#: The ranks that ancestors of this process held when it was forked.
_of_ancestors: list[HeldRank] = []


class HeldRank:
    """A rank of a group, which this process holds until it leaves; its forks see whether."""

    def __init__(self, rendezvous: str, rank: int) -> None:
        """Takes the rank."""
        self._name = (rendezvous, rank)
        #: Which holds it.
        self.process = os.getpid()
        # Memory that forks share.
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
        """Gives the rank up, in its own process; elsewhere it is not this one's to give up."""
        if self.process == os.getpid():
            self._taken[0] = 0

    def is_taken(self, rendezvous: str, rank: int) -> bool:
        """Whether this is the rank, and its process holds it."""
        return self._name == (rendezvous, rank) and self._taken[0] == 1 and _lives(self.process)


def inherit(held: HeldRank) -> None:
    """Takes note, in a process that has just been forked, of a rank that its parent holds."""
    _of_ancestors.append(held)


def check_not_held(rendezvous: str, rank: int) -> None:
    """Raises ConfigError if a process from which this one was forked holds the rank."""
    for held in _of_ancestors:
        if held.is_taken(rendezvous, rank):
            raise ConfigError(
                f"rank {rank} of the group at {rendezvous} is process {held.process}, from "
                f"which process {os.getpid()} was forked; use the communicator there, close it "
                "before the fork, or give this process a group of its own by other variables or "
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


#: What programs know by other names.
_NAMES = {"run": "a collective", "start": "an asynchronous collective", "listen_beside": "split"}


class OfParent:
    """Takes the place of the native communicator; to leave the group is nothing to be done."""

    def __init__(self, rank: int, host: str) -> None:
        """Remembers whose the communicator is."""
        self._rank, self._host = rank, host

    def abort(self, reason: str) -> None:
        """Does nothing: the group goes on with the parent."""

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
