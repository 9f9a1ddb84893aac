"""The fault matrix goes on: after each fault of ``faults.matrix``, an elastic job forms again.

The phases are those of the matrix. At the start of the first group no job is there that could go
on; so `RENDEZVOUS` and `HANDSHAKE` are those of the second group, which forms because a rank has
aborted the first one. A few faults are more than the loss of one process or of one connection.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from faults import matrix
from faults.matrix import (
    ALL_GATHER,
    CUT,
    DUPLICATED,
    EXITED,
    HANDSHAKE,
    IDLE,
    KILLED,
    RAISED,
    REDUCE_SCATTER,
    RENDEZVOUS,
    ROWS,
    SHUTDOWN,
    SLOW,
    STOPPED,
    TCP,
    WRONG_PROGRAM,
)

PAUSED = "SIGSTOP, until it is missed"
TWO_KILLED = "two SIGKILLs"
KILLED_AND_STOPPED = "SIGKILL and SIGSTOP"
APART = "link cut for good"
ONE_WAY = "host not heard"
DIVIDED = "network divided"
SIZES = (2, 3, 4, 5)

#: What becomes of the job.
SAME = "the same group goes on"
ALL = "all form the next group"
REPLACED = "the others go on, another one joins"
RETURNS = "the others go on, it joins them"
WAITS = "too few to go on: wait for it"
ENDS = "MismatchError on all"
REFUSED = "it cannot join, the others go on"

EXIT_CODES = {KILLED: -9, EXITED: 3, RAISED: 1, TWO_KILLED: -9, KILLED_AND_STOPPED: -9}
"""Of what ends a process."""
OF_TWO = (TWO_KILLED, KILLED_AND_STOPPED)
OF_HOSTS = (CUT, APART, ONE_WAY, DIVIDED)
FORMING = (RENDEZVOUS, HANDSHAKE)


@dataclass(frozen=True)
class Cell(matrix.Cell):
    """One drill."""

    @property
    def strikers(self) -> set[int]:
        """The processes that end or stop."""
        if self.fault in OF_TWO:
            return {self.faulty, self.successor}
        return {self.faulty} if self.fault in (*matrix.OF_A_PROCESS, PAUSED) else set()

    @property
    def ended(self) -> set[int]:
        """Who is gone for good; as many others join."""
        if self.phase == SHUTDOWN or self.fault not in EXIT_CODES:
            return set()
        return {self.faulty} if self.fault == KILLED_AND_STOPPED else self.strikers

    @property
    def silent(self) -> set[int]:
        """Who lives and is not heard. Where two cannot reach each other, it is one of them."""
        if self.phase == SHUTDOWN:
            return set()
        if self.fault == DIVIDED:
            return {(self.faulty + i) % self.world_size for i in range(self.world_size // 2)}
        if self.fault == KILLED_AND_STOPPED:
            return {self.successor}
        return {self.faulty} if self.fault in (STOPPED, *OF_HOSTS) else set()

    @property
    def living(self) -> int:
        """How many processes are not proved dead."""
        return self.world_size - len(self.ended)

    @property
    def can_go_on(self) -> bool:
        """Whether those that are left are more than half."""
        return 2 * (self.living - len(self.silent)) > self.living

    @property
    def left(self) -> int:
        """How many form the next group."""
        return self.living - (len(self.silent) if self.can_go_on else 0)

    @property
    def outcome(self) -> str:
        """What becomes of the job."""
        if self.fault == WRONG_PROGRAM:
            return REFUSED if self.phase == RENDEZVOUS else ENDS
        if self.phase == SHUTDOWN or self.fault in (SLOW, DUPLICATED):
            return SAME
        if not self.can_go_on:
            return WAITS
        if self.silent:
            return RETURNS
        return REPLACED if self.ended else ALL


MORE = (
    matrix.Row(PAUSED, (IDLE, REDUCE_SCATTER), None),
    matrix.Row(TWO_KILLED, (RENDEZVOUS, IDLE, ALL_GATHER), None),
    matrix.Row(KILLED_AND_STOPPED, (IDLE, ALL_GATHER), None),
    matrix.Row(APART, (IDLE,), None, TCP),
    matrix.Row(ONE_WAY, (IDLE, ALL_GATHER), None, TCP),
    matrix.Row(DIVIDED, (IDLE, ALL_GATHER), None, TCP),
)
_NEEDS_THREE = (PAUSED, *OF_TWO, DIVIDED)

QUICK = {
    "SIGKILL, reduce-scatter, tcp, 3 ranks",
    "sys.exit, handshake, shm, 3 ranks",
    "two SIGKILLs, idle, shm, 5 ranks",
    "half-open link, idle, tcp, 2 ranks",
}
"""The cells that every run of the tests includes; `make test-all` runs the rest too."""


def cells() -> list[Cell]:
    """All cells, in the order of the rows."""
    return [
        Cell(row.fault, phase, transport, size, row.error, row.within_s)
        for row in (*ROWS, *MORE)
        for phase, transport, size in itertools.product(row.phases, row.transports, SIZES)
        if size > 2 or row.fault not in _NEEDS_THREE
    ]
