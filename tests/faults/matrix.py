"""The fault matrix: what may go wrong, when, and what every surviving rank must then see.

A row holds for the product of its phases, transports and numbers of ranks; each such combination is
a :class:`Cell`. Combinations that mean nothing are absent: memory has no cable that could be cut.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

RENDEZVOUS = "rendezvous"
HANDSHAKE = "handshake"
IDLE = "idle"
FIRST_SEGMENT = "first segment"
REDUCE_SCATTER = "reduce-scatter"
ALL_GATHER = "all-gather"
SHUTDOWN = "shutdown"
PHASES = (RENDEZVOUS, HANDSHAKE, IDLE, FIRST_SEGMENT, REDUCE_SCATTER, ALL_GATHER, SHUTDOWN)
MOVING = (FIRST_SEGMENT, REDUCE_SCATTER, ALL_GATHER)

BOTH = ("tcp", "shm")
TCP = ("tcp",)

KILLED, STOPPED, RAISED, EXITED = "SIGKILL", "SIGSTOP", "exception", "sys.exit"
OF_A_PROCESS = (KILLED, STOPPED, RAISED, EXITED)
CUT, HUNG, HALF_OPEN, SLOW = "host cut off", "link cut", "half-open link", "slow link"
CORRUPTED, TRUNCATED, DUPLICATED = "corrupted frame", "truncated frame", "duplicated connection"
TURNED = "turned bit, with checksums"
BY_PROXY = (HUNG, HALF_OPEN, SLOW, CORRUPTED, TURNED, TRUNCATED, DUPLICATED)
WRONG_PROGRAM = "wrong program"

AT_ONCE_S = 1.0
"""Bound for what is noticed in milliseconds."""
SILENCE_S = 12.0
"""Bound for what only silence tells: the default ``peer_timeout`` of 10 s and two heartbeats."""
COMPLETION_S = 60.0
"""Bound for what goes on to its end, on a busy machine."""
SHORT_TIMEOUT_S = 6.0
"""The group's two timeouts where one of them is what ends the wait."""
TIMEOUT_S = 26.0
"""Bound for what only that timeout tells."""
LONG_TIMEOUT_S = 90.0
"""The same elsewhere: beyond every bound, so they never are what ends the wait."""


@dataclass(frozen=True)
class Row:
    """What one fault does in some phases."""

    fault: str
    phases: tuple[str, ...]
    error: str | None
    """Class of the exception on every survivor, or None: the fault must not matter."""
    within_s: float
    transports: tuple[str, ...] = BOTH


@dataclass(frozen=True)
class Cell:
    """One drill."""

    fault: str
    phase: str
    transport: str
    world_size: int
    error: str | None
    within_s: float

    @property
    def name(self) -> str:
        """As pytest and the report write it."""
        return f"{self.fault}, {self.phase}, {self.transport}, {self.world_size} ranks"

    @property
    def outcome(self) -> str:
        """What a table says of it."""
        return self.error or "no error"

    @property
    def faulty(self) -> int:
        """The rank that fails: rank 0, where all meet, must be no better off than the others."""
        return 0 if self.transport == "shm" else self.world_size - 1

    @property
    def successor(self) -> int:
        """The other end of the link that fails, where a link does."""
        return (self.faulty + 1) % self.world_size

    @property
    def survivors(self) -> list[int]:
        """The ranks that must see what the cell says: where a link fails, those at its ends too."""
        ranks = range(self.world_size)
        if self.fault in (CUT, *BY_PROXY):
            return list(ranks)
        return [rank for rank in ranks if rank != self.faulty]

    def may_blame(self, rank: int) -> set[int]:
        """Whom ``rank`` may blame."""
        if self.fault == CUT and rank == self.faulty:
            return set(range(self.world_size)) - {rank}  # it is all others that fell silent
        if self.fault in BY_PROXY:
            return {self.faulty, self.successor}
        if self.fault == WRONG_PROGRAM and self.world_size == 2 and self.phase in MOVING:
            return {1}  # of two that disagree, rank 0 is taken to be right
        return {self.faulty}

    @property
    def timeout_s(self) -> float:
        """The group's timeout, for forming and for standing still."""
        return SHORT_TIMEOUT_S if self.within_s == TIMEOUT_S else LONG_TIMEOUT_S


ROWS = (
    Row(KILLED, (RENDEZVOUS,), "RendezvousError", TIMEOUT_S),
    Row(KILLED, (HANDSHAKE,), "RendezvousError", AT_ONCE_S),
    Row(KILLED, (IDLE, *MOVING), "PeerLostError", AT_ONCE_S),
    Row(KILLED, (SHUTDOWN,), None, AT_ONCE_S),
    Row(STOPPED, (RENDEZVOUS, HANDSHAKE), "RendezvousError", TIMEOUT_S),
    Row(STOPPED, (IDLE, *MOVING), "PeerLostError", SILENCE_S),
    Row(STOPPED, (SHUTDOWN,), None, AT_ONCE_S),
    Row(RAISED, (RENDEZVOUS,), "RendezvousError", TIMEOUT_S),
    Row(RAISED, (HANDSHAKE, IDLE, *MOVING), "AbortedError", AT_ONCE_S),
    Row(RAISED, (SHUTDOWN,), None, AT_ONCE_S),
    Row(EXITED, (RENDEZVOUS,), "RendezvousError", TIMEOUT_S),
    Row(EXITED, (HANDSHAKE,), "AbortedError", AT_ONCE_S),
    Row(EXITED, (IDLE, *MOVING), "PeerLostError", AT_ONCE_S),
    Row(EXITED, (SHUTDOWN,), None, AT_ONCE_S),
    Row(CUT, (RENDEZVOUS,), "RendezvousError", TIMEOUT_S, TCP),
    Row(CUT, (IDLE, REDUCE_SCATTER, ALL_GATHER), "PeerLostError", SILENCE_S, TCP),
    Row(HUNG, (HANDSHAKE,), "RendezvousError", TIMEOUT_S),
    Row(HUNG, (IDLE,), "PeerLostError", SILENCE_S),
    Row(HUNG, MOVING, "CollectiveTimeoutError", TIMEOUT_S, TCP),
    Row(HALF_OPEN, (HANDSHAKE,), "RendezvousError", TIMEOUT_S),
    Row(HALF_OPEN, (IDLE,), "PeerLostError", AT_ONCE_S),
    Row(HALF_OPEN, MOVING, "PeerLostError", AT_ONCE_S, TCP),
    Row(SLOW, (HANDSHAKE, IDLE), None, COMPLETION_S),
    Row(SLOW, MOVING, None, COMPLETION_S, TCP),
    Row(CORRUPTED, (HANDSHAKE,), "AuthenticationError", TIMEOUT_S),
    Row(CORRUPTED, (IDLE,), "ProtocolError", AT_ONCE_S),
    Row(CORRUPTED, (FIRST_SEGMENT,), "ProtocolError", AT_ONCE_S, TCP),
    Row(TURNED, MOVING, "ProtocolError", AT_ONCE_S, TCP),
    Row(TRUNCATED, (HANDSHAKE,), None, COMPLETION_S),
    Row(TRUNCATED, (IDLE,), "PeerLostError", AT_ONCE_S),
    Row(TRUNCATED, MOVING, "PeerLostError", AT_ONCE_S, TCP),
    Row(DUPLICATED, (RENDEZVOUS, HANDSHAKE), None, COMPLETION_S),
    Row(WRONG_PROGRAM, (RENDEZVOUS,), "RendezvousError", TIMEOUT_S),
    Row(WRONG_PROGRAM, (FIRST_SEGMENT,), "MismatchError", AT_ONCE_S),
)

QUICK = {
    "SIGKILL, handshake, tcp, 2 ranks",
    "SIGKILL, idle, tcp, 4 ranks",
    "SIGKILL, first segment, shm, 2 ranks",
    "SIGKILL, shutdown, tcp, 2 ranks",
    "SIGSTOP, reduce-scatter, shm, 4 ranks",
    "slow link, first segment, tcp, 2 ranks",
    "exception, all-gather, tcp, 4 ranks",
    "sys.exit, reduce-scatter, shm, 2 ranks",
    "half-open link, reduce-scatter, tcp, 2 ranks",
    "corrupted frame, first segment, tcp, 4 ranks",
    "turned bit, with checksums, all-gather, tcp, 4 ranks",
    "truncated frame, idle, shm, 2 ranks",
    "duplicated connection, handshake, tcp, 2 ranks",
    "wrong program, first segment, shm, 4 ranks",
}
"""The cells that every run of the tests includes; `make test-all` runs the rest too."""


def cells() -> list[Cell]:
    """All cells, in the order of the rows."""
    return [
        Cell(row.fault, phase, transport, world_size, row.error, row.within_s)
        for row in ROWS
        for phase, transport, world_size in itertools.product(row.phases, row.transports, (2, 4))
    ]
