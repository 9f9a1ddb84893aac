"""Overlap of collectives with computation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from gradring.group.communicator import Communicator
from gradring.tensorflow.graph.ops import group_of


@dataclass
class Overlap:
    """Times of one rank, in seconds.

    Attributes:
        communication_s: Time in which bytes moved: from the peers' entry into a collective to its
            end.
        waiting_s: Time between this rank's entry into a collective and its peers' entry.
        exposed_s: Time in which the program was blocked by collectives.

    Examples:
        >>> overlap = gradring.tensorflow.Overlap(communication_s=3.0, waiting_s=1.0, exposed_s=1.0)
        >>> overlap.collectives_s, overlap.hidden_s, overlap.hidden_share
        (4.0, 3.0, 0.75)
        >>> print(overlap)
        75% of 4.000 s in collectives hidden (1.000 s of it waiting for peers), 1.000 s exposed
    """

    communication_s: float = 0.0
    waiting_s: float = 0.0
    exposed_s: float = 0.0

    @property
    def collectives_s(self) -> float:
        """Seconds in collectives, which run one after the other: waiting and communication."""
        return self.communication_s + self.waiting_s

    @property
    def hidden_s(self) -> float:
        """Seconds in collectives while this rank continued to compute."""
        return max(0.0, self.collectives_s - self.exposed_s)

    @property
    def hidden_share(self) -> float:
        """Hidden part of the time in collectives, from 0 to 1; 1 if there were no collectives."""
        return self.hidden_s / self.collectives_s if self.collectives_s > 0 else 1.0

    def __str__(self) -> str:
        return (
            f"{self.hidden_share:.0%} of {self.collectives_s:.3f} s in collectives hidden "
            f"({self.waiting_s:.3f} s of it waiting for peers), {self.exposed_s:.3f} s exposed"
        )


@contextlib.contextmanager
def measure_overlap(communicator: Communicator | None = None) -> Iterator[Overlap]:
    """Measures how much of the time in collectives is hidden while the block runs.

    The last step must have ended before the block ends: read one of its results. An op waits only
    when all gradients of its reduction have started. Exposed time is therefore the communication
    that the backward pass does not hide. An optimizer that already works on other gradients can
    still hide some of it.

    Args:
        communicator: Group whose collectives are measured; default as for `all_reduce`.

    Yields:
        The measurement; all zero until the block ends.

    Examples:
        >>> with gradring.tensorflow.measure_overlap() as overlap:
        ...     total = gradring.tensorflow.all_reduce(tf.ones([1000]))
        >>> print("measured:", overlap)
        measured: ...% of ... s in collectives hidden (... s of it waiting for peers), ... s exposed
    """
    comm = group_of(communicator)
    overlap = Overlap()
    before = comm.stats()
    try:
        yield overlap
    finally:
        after = comm.stats()
        overlap.communication_s = after["moving_s"] - before["moving_s"]
        overlap.waiting_s = after["waiting_s"] - before["waiting_s"]
        overlap.exposed_s = after["exposed_s"] - before["exposed_s"]
