"""A TCP proxy in front of every rank of a drill, which harms the traffic when it is told to.

Each rank announces its proxy's address, so every connection of the group passes here. A *flow* is
one direction of a connection; an initiator's first message tells its rank and its purpose.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

PIECE_BYTES = 64 << 10
SLOW_BYTES_PER_S = 16 << 20
ALL_BITS = 0xFF
GREETING_LIMIT_S = 10.0
GROUP_BYTES = 16
"""Of a group's identity in a greeting."""

Purpose = Literal["join", "data", "control", "?"]
_PURPOSES: tuple[Purpose, ...] = ("join", "data", "control")

Harm = Literal["hang", "half-open", "truncate", "corrupt", "slow", "duplicate", "hold"]


@dataclass(frozen=True)
class Flow:
    """One direction of a connection between two ranks."""

    initiator: int
    responder: int
    purpose: Purpose
    to_responder: bool
    generation: int

    @property
    def ends(self) -> tuple[int, int]:
        """Who sends, and who receives."""
        ends = (self.initiator, self.responder)
        return ends if self.to_responder else ends[::-1]


@dataclass
class Trap:
    """Harm for the flows that match, from a byte on.

    Attributes:
        harm: What to do: ``hang`` forwards nothing more in either direction and says nothing;
            ``half-open`` ends the receiver's side alone; ``truncate`` ends both; ``corrupt`` turns
            over bits of one byte; ``slow`` limits the rate; ``duplicate`` connects to the responder
            once more with the same greeting; ``hold`` hangs, and only calls ``sprung``.
        matches: The flows meant.
        after: How many more bytes of such a flow pass unharmed.
        sprung: Called once, when the harm is done.
        mask: The bits that ``corrupt`` turns.
    """

    harm: Harm
    matches: Callable[[Flow], bool]
    after: int
    sprung: Callable[[], None]
    mask: int = ALL_BITS


class Proxies:
    """The proxies of all ranks; a context manager that ends them."""

    def __init__(self, targets: list[tuple[str, int]]) -> None:
        """Listens for every rank that listens at ``targets``, by rank."""
        self._targets = targets
        self._trap: Trap | None = None
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._ended = threading.Event()
        self._reached: set[int] = set()
        self._listeners = [socket.create_server(("127.0.0.1", 0), backlog=64) for _ in targets]
        self._sockets += self._listeners
        self.addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in self._listeners]
        for rank, listener in enumerate(self._listeners):
            self._start(self._serve, rank, listener)

    def __enter__(self) -> Proxies:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def arm(self, trap: Trap) -> None:
        """From now on harms what ``trap`` says, once."""
        with self._lock:
            self._trap = trap

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        threading.Thread(target=target, args=arguments, daemon=True).start()

    def _serve(self, rank: int, listener: socket.socket) -> None:
        while True:
            try:
                initiator, _ = listener.accept()
            except OSError:  # the end
                return
            self._start(self._connect, rank, initiator)

    def _connect(self, rank: int, initiator: socket.socket) -> None:
        self._sockets.append(initiator)
        responder = self._reach(rank)
        if responder is None:
            _reset(initiator)
            return
        self._reached.add(rank)
        self._sockets.append(responder)
        for one in (initiator, responder):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        initiator.settimeout(GREETING_LIMIT_S)
        with contextlib.suppress(OSError):
            greeting = _first_message(initiator)
            rank_of_initiator, generation, purpose = _introduction(greeting)
            initiator.settimeout(None)
            flow = Flow(rank_of_initiator, rank, purpose, True, generation)
            back = Flow(rank_of_initiator, rank, purpose, False, generation)
            connection = _Connection(self)
            self._start(connection.pump, back, responder, initiator, b"")
            connection.pump(flow, initiator, responder, greeting)

    def _reach(self, rank: int) -> socket.socket | None:
        """A connection to a rank, which may begin to listen a little later than its proxy.

        When it has ended, its proxy refuses as well.
        """
        deadline = time.monotonic() + GREETING_LIMIT_S
        while time.monotonic() < deadline and not self._ended.is_set():
            with contextlib.suppress(OSError):
                return socket.create_connection(self._targets[rank])
            if rank in self._reached:
                with contextlib.suppress(OSError):  # another connection has ended it
                    self._listeners[rank].shutdown(socket.SHUT_RDWR)
                break
            time.sleep(0.02)
        return None

    def sprung_by(self, flow: Flow, length: int) -> tuple[Trap, int] | None:
        """The trap and how much of the next ``length`` bytes passes, if it springs now."""
        with self._lock:
            trap = self._trap
            if trap is None or not trap.matches(flow):
                return None
            if trap.after >= length:
                trap.after -= length
                return None
            self._trap = None
        return trap, trap.after

    def wait_for_the_end(self) -> None:
        self._ended.wait()

    def connect_again(self, rank: int, greeting: bytes) -> None:
        """Connects to a rank with somebody else's greeting, and hangs up when it has answered."""
        with contextlib.suppress(OSError), socket.create_connection(self._targets[rank]) as again:
            again.settimeout(GREETING_LIMIT_S)
            again.sendall(greeting)
            again.recv(PIECE_BYTES)


class _Connection:
    """Two sockets between which bytes are carried."""

    def __init__(self, proxies: Proxies) -> None:
        self._proxies = proxies
        self._hung = threading.Event()

    def pump(self, flow: Flow, source: socket.socket, target: socket.socket, first: bytes) -> None:
        """Carries one direction until it ends.

        An end that can be sent nothing may have said something before: what it has said is carried
        by the other pump, so its socket stays as it is.
        """
        try:
            piece = first or source.recv(PIECE_BYTES)
            while piece and not self._hung.is_set():
                try:
                    self._carry(flow, source, target, piece)
                except OSError:
                    return
                piece = source.recv(PIECE_BYTES)
            if not self._hung.is_set():
                target.shutdown(socket.SHUT_WR)
        except ConnectionResetError:
            if not self._hung.is_set():
                _reset(target)
        except OSError:
            _end(target)

    def _carry(
        self, flow: Flow, source: socket.socket, target: socket.socket, piece: bytes
    ) -> None:
        sprung = self._proxies.sprung_by(flow, len(piece))
        if sprung is None:
            target.sendall(piece)
            return
        trap, unharmed = sprung
        target.sendall(piece[:unharmed])
        rest = piece[unharmed:]
        if trap.harm == "corrupt":
            target.sendall(bytes([rest[0] ^ trap.mask]) + rest[1:])
        elif trap.harm == "duplicate":
            self._proxies.connect_again(flow.responder, piece)
            target.sendall(rest)
        if trap.harm in ("hang", "hold", "half-open", "truncate"):
            self._hung.set()
        if trap.harm in ("half-open", "truncate"):
            _end(target)
        if trap.harm == "truncate":
            _end(source)
        trap.sprung()
        if trap.harm in ("hang", "hold"):
            self._proxies.wait_for_the_end()
        if trap.harm == "half-open":
            while source.recv(PIECE_BYTES):  # the sender's words go nowhere
                pass
        if trap.harm == "slow":
            self._crawl(source, target, rest)

    def _crawl(self, source: socket.socket, target: socket.socket, piece: bytes) -> None:
        while piece:
            target.sendall(piece)
            time.sleep(len(piece) / SLOW_BYTES_PER_S)
            piece = source.recv(PIECE_BYTES)


def _first_message(initiator: socket.socket) -> bytes:
    """An initiator's greeting: four bytes of length, and so many more."""
    message = initiator.recv(4, socket.MSG_WAITALL)
    if len(message) == 4:
        message += initiator.recv(int.from_bytes(message, "little"), socket.MSG_WAITALL)
    return message


def _introduction(greeting: bytes) -> tuple[int, int, Purpose]:
    """An initiator's rank, generation and purpose; all numbers of a small group take one byte."""
    # kind of message, version, initiator, responder, world size, group, generation, purpose
    body, at = greeting[4:], 5 + GROUP_BYTES + 1
    if len(body) <= at or body[0] != 0 or body[at] >= len(_PURPOSES):
        return -1, 0, "?"
    return body[2], body[at - 1], _PURPOSES[body[at]]


def _end(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)


def _reset(one: socket.socket) -> None:
    """Closes without a goodbye."""
    with contextlib.suppress(OSError):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        one.shutdown(socket.SHUT_RD)  # the socket lives until nobody waits for it
    one.close()
