"""What a communicator is in a forked child: still its parent's, and of no use."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from gradring.errors import GradringError

if TYPE_CHECKING:
    from gradring.communicator import Communicator


class OfParent:
    """Takes the place of the native communicator; to leave the group is nothing to be done."""

    def __init__(self, communicator: Communicator) -> None:
        """Remembers whose the communicator is."""
        self._rank, self._host = communicator.rank, communicator.host

    def abort(self, reason: str) -> None:
        """Does nothing: the group goes on with the parent."""

    def close(self) -> None:
        """Does nothing: the parent is still in the group."""

    def __getattr__(self, name: str) -> Any:
        """Refuses everything else."""
        raise GradringError(
            f"{name} on rank {self._rank} on {self._host}: process {os.getpid()} was forked from "
            "the one to which this communicator belongs; use it there only, or start this process "
            "with multiprocessing's spawn and give it a group of its own",
            rank=self._rank,
            host=self._host,
        )
