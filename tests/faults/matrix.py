"""The fault matrix: what may go wrong, when, and what every surviving rank must then see.

A row holds for the product of its phases, transports and numbers of ranks; each such combination is
a :class:`Cell`. Combinations that mean nothing are absent: memory has no cable that could be cut.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from gradring.config.values import Transport

RENDEZVOUS = "rendezvous"
HANDSHAKE = "handshake"
IDLE = "idle"
FIRST_SEGMENT = "first segment"
REDUCE_SCATTER = "reduce-scatter"
ALL_GATHER = "all-gather"
SHUTDOWN = "shutdown"
PHASES = (RENDEZVOUS, HANDSHAKE, IDLE, FIRST_SEGMENT, REDUCE_SCATTER, ALL_GATHER, SHUTDOWN)
MOVING = (FIRST_SEGMENT, REDUCE_SCATTER, ALL_GATHER)

BOTH: tuple[Transport, ...] = ("tcp", "shm")
TCP: tuple[Transport, ...] = ("tcp",)

KILLED, STOPPED, RAISED, EXITED = "SIGKILL", "SIGSTOP", "exception", "sys.exit"
OF_A_PROCESS = (KILLED, STOPPED, RAISED, EXITED)
CUT, HUNG, HALF_OPEN, SLOW = "host cut off", "link cut", "half-open link", "slow link"
CORRUPTED, TRUNCATED, DUPLICATED = "corrupted frame", "truncated frame", "duplicated connection"
TURNED = "turned bit, with checksums"
BY_PROXY = (HUNG, HALF_OPEN, SLOW, CORRUPTED, TURNED, TRUNCATED, DUPLICATED)
WRONG_PROGRAM = "wrong program"

AT_ONCE_S = 30.0
"""Bound for what is noticed in milliseconds, on a busy machine: no timeout ends the wait."""
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
    transports: tuple[Transport, ...] = BOTH
    within_s: float | None = None
    """Bound on the time until then, while the group forms. Once it has formed, the simulation says
    when (`rust/simulation/src/groups/facts.rs`)."""


@dataclass(frozen=True)
class Cell:
    """One drill."""

    fault: str
    phase: str
    transport: Transport
    world_size: int
    error: str | None
    within_s: float | None

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
        decides = self.within_s == TIMEOUT_S or self.error == "CollectiveTimeoutError"
        return SHORT_TIMEOUT_S if decides else LONG_TIMEOUT_S


ROWS = (
    Row(KILLED, (RENDEZVOUS,), "RendezvousError", within_s=TIMEOUT_S),
    Row(KILLED, (HANDSHAKE,), "RendezvousError", within_s=AT_ONCE_S),
    Row(KILLED, (IDLE, *MOVING), "PeerLostError"),
    Row(KILLED, (SHUTDOWN,), None),
    Row(STOPPED, (RENDEZVOUS, HANDSHAKE), "RendezvousError", within_s=TIMEOUT_S),
    Row(STOPPED, (IDLE, *MOVING), "PeerLostError"),
    Row(STOPPED, (SHUTDOWN,), None),
    Row(RAISED, (RENDEZVOUS,), "RendezvousError", within_s=TIMEOUT_S),
    Row(RAISED, (HANDSHAKE,), "AbortedError", within_s=AT_ONCE_S),
    Row(RAISED, (IDLE, *MOVING), "AbortedError"),
    Row(RAISED, (SHUTDOWN,), None),
    Row(EXITED, (RENDEZVOUS,), "RendezvousError", within_s=TIMEOUT_S),
    Row(EXITED, (HANDSHAKE,), "AbortedError", within_s=AT_ONCE_S),
    Row(EXITED, (IDLE, *MOVING), "PeerLostError"),
    Row(EXITED, (SHUTDOWN,), None),
    Row(CUT, (RENDEZVOUS,), "RendezvousError", TCP, TIMEOUT_S),
    Row(CUT, (IDLE, REDUCE_SCATTER, ALL_GATHER), "PeerLostError", TCP),
    Row(HUNG, (HANDSHAKE,), "RendezvousError", within_s=TIMEOUT_S),
    Row(HUNG, (IDLE,), "PeerLostError"),
    Row(HUNG, MOVING, "CollectiveTimeoutError", TCP),
    Row(HALF_OPEN, (HANDSHAKE,), "RendezvousError", within_s=TIMEOUT_S),
    Row(HALF_OPEN, (IDLE,), "PeerLostError"),
    Row(HALF_OPEN, MOVING, "PeerLostError", TCP),
    Row(SLOW, (HANDSHAKE, IDLE), None),
    Row(SLOW, MOVING, None, TCP),
    Row(CORRUPTED, (HANDSHAKE,), "AuthenticationError", within_s=TIMEOUT_S),
    Row(CORRUPTED, (IDLE,), "ProtocolError"),
    Row(CORRUPTED, (FIRST_SEGMENT,), "ProtocolError", TCP),
    Row(TURNED, MOVING, "ProtocolError", TCP),
    Row(TRUNCATED, (HANDSHAKE,), None),
    Row(TRUNCATED, (IDLE,), "PeerLostError"),
    Row(TRUNCATED, MOVING, "PeerLostError", TCP),
    Row(DUPLICATED, (RENDEZVOUS, HANDSHAKE), None),
    Row(WRONG_PROGRAM, (RENDEZVOUS,), "RendezvousError", within_s=TIMEOUT_S),
    Row(WRONG_PROGRAM, (FIRST_SEGMENT,), "MismatchError"),
)

QUICK = {
    "SIGKILL, handshake, tcp, 2 ranks",
    "SIGKILL, idle, tcp, 4 ranks",
    "SIGKILL, first segment, shm, 2 ranks",
    "SIGKILL, shutdown, tcp, 2 ranks",
    "SIGSTOP, reduce-scatter, shm, 4 ranks",
    "SIGSTOP, shutdown, shm, 2 ranks",
    "exception, rendezvous, tcp, 2 ranks",
    "exception, all-gather, tcp, 4 ranks",
    "sys.exit, idle, tcp, 2 ranks",
    "sys.exit, reduce-scatter, shm, 2 ranks",
    "host cut off, idle, tcp, 2 ranks",
    "link cut, all-gather, tcp, 2 ranks",
    "half-open link, reduce-scatter, tcp, 2 ranks",
    "slow link, first segment, tcp, 2 ranks",
    "corrupted frame, idle, shm, 2 ranks",
    "corrupted frame, first segment, tcp, 4 ranks",
    "turned bit, with checksums, all-gather, tcp, 4 ranks",
    "truncated frame, idle, shm, 2 ranks",
    "duplicated connection, handshake, tcp, 2 ranks",
    "wrong program, first segment, shm, 4 ranks",
}
"""The cells that every run of the tests includes, one for each fault and phase at least: they show
that sockets, memory and signals lead to what the simulation tries in all places
(`rust/simulation/src/groups/facts.rs`). `make test-all` runs the rest too."""


def cells() -> list[Cell]:
    """All cells, in the order of the rows."""
    return [
        Cell(row.fault, phase, transport, world_size, row.error, row.within_s)
        for row in ROWS
        for phase, transport, world_size in itertools.product(row.phases, row.transports, (2, 4))
    ]
