"""What a system, and the file of a peer, have to provide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from gradring.communicator import Communicator


class Reduction(Protocol):
    """One all-reduce of one size, made ready to be repeated."""

    def reset(self) -> None:
        """Puts the input in place and spoils the last result; not timed."""

    def run(self) -> None:
        """Performs the all-reduce and returns when this rank has its result; timed."""

    def result(self) -> NDArray[Any]:
        """What the last run produced; not timed."""


class System(Protocol):
    """Something that performs all-reduces among the ranks.

    Attributes:
        name: As it stands in the table.
        transport: What carries the bytes.
    """

    name: str
    transport: str

    @property
    def algorithm(self) -> str:
        """How the bytes were reduced; asked after a run."""

    def prepare(self, source: NDArray[Any], op: str) -> Reduction:
        """Makes an all-reduce of ``source`` ready; may enter collectives of its own."""


class Peer(Protocol):
    """What the module of a peer in this package has.

    Attributes:
        MODULE: What it imports when its systems are opened.
        INSTALL: The command that installs it.
    """

    MODULE: str
    INSTALL: str

    def refusal(self, dtype: str, op: str, world_size: int) -> str | None:
        """Why it cannot be compared in this, as a message; None if it can."""

    def open_systems(self, comm: Communicator) -> Sequence[System]:
        """Sets the peer up among the ranks of ``comm``, which all call it."""
