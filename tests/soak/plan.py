"""The plan of a round. Every process makes the same one from the seed and the round's number."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from gradring import errors

NONE, ABORT, RAISED, CLOSED, MISMATCH, KILLED = (
    *("no fault", "abort", "exception", "close", "mismatch", "SIGKILL"),
)
SEEN: dict[str, type[errors.GradringError]] = {
    ABORT: errors.AbortedError,
    RAISED: errors.AbortedError,
    CLOSED: errors.PeerLostError,
    MISMATCH: errors.MismatchError,
    KILLED: errors.PeerLostError,
}
"""What the others get, by fault."""

TRANSPORTS = ("tcp", "shm", "auto")
ALGORITHMS = (
    "auto",
    "auto",
    "ring",
    "direct",
    "one_shot",
    "star",
    "one_shot:4KiB,direct:64KiB,ring",
)


@dataclass(frozen=True)
class Part:
    """A part of the soak: how many processes do what.

    The last process may be killed; the others live as long as the part.
    """

    name: str
    world_size: int
    trains: bool = False
    longest: int = 5000
    """Batches of collectives, or training steps, in the longest round."""
    steady: bool = False
    """Whether every round is the longest, and nothing fails."""

    @property
    def mortal(self) -> int:
        """The process that may be killed."""
        return self.world_size - 1


@dataclass(frozen=True)
class Plan:
    """One round of one part."""

    part: Part
    seed: str
    ranks: tuple[int, ...]
    """The rank of each process: they change places, so that everybody is rank 0 at times."""
    options: dict[str, Any]
    """Arguments of ``gradring.init``."""
    length: int
    fault: str
    faulty: int
    """The process at fault."""
    fault_at: int
    traced: bool
    """Whether a timeline is recorded."""

    @classmethod
    def of(cls, part: Part, seed: str, number: int) -> Plan:
        """The plan of round ``number``."""
        text = f"{seed}/{part.name}/{number}"
        dice = random.Random(text)
        ranks = list(range(part.world_size))
        dice.shuffle(ranks)
        # As many rounds of ten batches as of thousands.
        length = part.longest if part.steady else int(part.longest ** dice.uniform(0.4, 1.0))
        faults = (NONE, ABORT, RAISED, KILLED, CLOSED, MISMATCH)
        weights = (4, 1, 1, 1, 0, 0) if part.trains else (4, 2, 2, 1, 2, 1)
        fault = NONE if part.steady else dice.choices(faults, weights)[0]
        return cls(
            part=part,
            seed=text,
            ranks=tuple(ranks),
            options={
                "transport": dice.choice(TRANSPORTS),
                "algorithm": dice.choice(ALGORITHMS),
                "reproducible": dice.random() < 0.3,
                "wire_dtype": dice.choice((None, None, "bfloat16", "float16")),
                "streams": dice.choice((1, 1, 2, 4)),
            },
            length=length,
            fault=fault,
            faulty=part.mortal if fault == KILLED else dice.randrange(part.world_size),
            # Not before the first batch: until then, others may be busy joining.
            fault_at=dice.randrange(1, length),
            traced=dice.random() < 0.1,
        )

    @property
    def first(self) -> int:
        """The process that is rank 0."""
        return self.ranks.index(0)

    @property
    def blamed(self) -> int:
        """The rank that errors must name."""
        if self.fault == MISMATCH and self.part.world_size == 2:
            return 1  # without a majority, rank 0 is taken to be right
        return self.ranks[self.faulty]

    def kills(self, process: int) -> bool:
        """Whether this process does not survive the round."""
        return self.fault == KILLED and process == self.faulty
