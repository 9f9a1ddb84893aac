"""How much of the communication was hidden behind computation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from gradring import _native
from gradring.communicator import Communicator
from gradring.tensorflow.ops import current_communicator


@dataclass
class Overlap:
    """Times of one rank, in seconds."""

    #: In which the communicator was at work: collectives run one after the other.
    communication_s: float = 0.0
    #: Of these, until the peers had entered the collective too.
    waiting_s: float = 0.0
    #: In which some op of this process waited for communication to end.
    exposed_s: float = 0.0

    @property
    def hidden_s(self) -> float:
        """Communication during which this rank went on computing."""
        return max(0.0, self.communication_s - self.exposed_s)

    @property
    def hidden_share(self) -> float:
        """Part of the communication that was hidden, from 0 to 1; 1 if there was none."""
        return self.hidden_s / self.communication_s if self.communication_s > 0 else 1.0

    def __str__(self) -> str:
        return (
            f"{self.hidden_share:.0%} of {self.communication_s:.3f} s of communication hidden "
            f"({self.waiting_s:.3f} s of it waiting for peers), {self.exposed_s:.3f} s exposed"
        )


@contextlib.contextmanager
def measure_overlap(communicator: Communicator | None = None) -> Iterator[Overlap]:
    """Measures how much communication is hidden while the block runs.

    ```python
    with gradring.tensorflow.measure_overlap() as overlap:
        for batch in dataset:
            train_step(batch)
    print(overlap)  # 81% of 1.214 s of communication hidden ...
    ```

    Steps must have ended when the block does: read a result of the last one. An op waits only when
    all gradients of its call have been started, so exposed time is what the backward pass does not
    hide; an optimizer that already works on other gradients may still hide some of it.

    Args:
      communicator: whose collectives to count; default as for `all_reduce`. Waiting ops are counted
        for the whole process.

    Yields:
      The measurement; all zero until the block ends.
    """
    comm = communicator or current_communicator()
    overlap = Overlap()
    before, blocked_before = comm.stats(), _native.tensorflow_counters()["blocked_ns"]
    try:
        yield overlap
    finally:
        after, blocked_after = comm.stats(), _native.tensorflow_counters()["blocked_ns"]
        overlap.communication_s = after["time_s"] - before["time_s"]
        overlap.waiting_s = after["waiting_s"] - before["waiting_s"]
        overlap.exposed_s = (blocked_after - blocked_before) / 1e9
