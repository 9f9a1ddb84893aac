"""The raw links of a ring: the limit of all-reduce over TCP if it only moved bytes.

Every rank sends to the next rank while it receives as many bytes from the previous one. The TCP
connections are like gradring's: two ranks have one for both directions, more ranks have one to each
neighbour. One thread polls for both directions, and nothing is computed. ``link`` sends from a
buffer of the all-reduce's size into another one. ``link in cache`` repeats one block that stays in
the cache.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradring.group.communicator import Communicator
from gradring.tools.bench.systems.agree import agree_on_addresses, agree_on_ports
from gradring.tools.bench.systems.system import LocalReduction, System
from gradring.tools.bench.values import Problem

NAME = "link"
CACHED_NAME = "link in cache"
#: Size of the block that is repeated in cache; 1 MiB is the fastest over loopback.
CACHED_BYTES = 1 << 20
#: Smallest buffer whose time depends on the bandwidth of the links, not on their latency.
LEAST_BYTES = 4 << 20
#: Time limit without progress.
TIMEOUT_S = 60.0


class Link:
    """This rank's ends of two links: to the next rank and from the previous one."""

    def __init__(
        self, following: socket.socket, previous: socket.socket, *, same_host: bool = True
    ) -> None:
        """Uses two connections, or two descriptors of one; the caller closes them."""
        self._next, self._previous = following, previous
        for end in (following, previous):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if same_host:
                _choose_congestion(end)

    def exchange(self, sent: memoryview, received: memoryview, count: int) -> None:
        """Sends ``count`` bytes, repeating ``sent``, and at the same time receives as many."""
        self._next.setblocking(False)
        self._previous.setblocking(False)
        poller = select.poll()
        poller.register(self._next, select.POLLOUT)
        poller.register(self._previous, select.POLLIN)
        left = {self._next.fileno(): count, self._previous.fileno(): count}
        while any(left.values()):
            ready = poller.poll(TIMEOUT_S * 1000)
            if not ready:
                raise TimeoutError(f"a link of the ring has been silent for {TIMEOUT_S:g} s")
            for descriptor, _ in ready:
                done = count - left[descriptor]
                if descriptor == self._next.fileno():
                    moved = self._next.send(_part(sent, done, left[descriptor]))
                else:
                    moved = self._previous.recv_into(_part(received, done, left[descriptor]))
                    if moved == 0:
                        raise ConnectionError("the rank before this one has closed its link")
                left[descriptor] -= moved
                if left[descriptor] == 0:
                    poller.unregister(descriptor)

    def descriptors(self) -> tuple[int, int]:
        """Returns the descriptors of the links to the next and from the previous rank."""
        return self._next.fileno(), self._previous.fileno()

    def congestion_control(self) -> str:
        """Returns the TCP congestion control of the outgoing connection."""
        name = self._next.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        return name.rstrip(b"\0").decode()

    def round_trip(self, rank: int, world_size: int) -> float:
        """Sends 4 bytes once around the ring; returns the time in seconds, valid on rank 0."""
        for end in (self._next, self._previous):
            end.settimeout(TIMEOUT_S)
        start = time.perf_counter()
        if rank == 0:
            self._next.sendall(b"ping")
        token = self._previous.recv(4, socket.MSG_WAITALL)
        if rank != 0:
            self._next.sendall(token)
        return time.perf_counter() - start


def open_ring(comm: Communicator, closing: contextlib.ExitStack) -> Link:
    """Connects every rank with the next one; all ranks must call it.

    Two ranks have one connection, which each polls with a descriptor per direction.
    """
    ports = agree_on_ports(comm, comm.world_size)
    addresses = agree_on_addresses(comm)
    same_host = len(set(addresses)) == 1
    with socket.create_server((addresses[comm.rank], ports[comm.rank])) as server:
        server.settimeout(TIMEOUT_S)
        if same_host:
            # Before anything is connected: Linux continues to pace a connection that began with
            # BBR.
            _choose_congestion(server)
        comm.barrier()
        ends: list[socket.socket] = []
        if comm.world_size > 2 or comm.rank == 1:
            outgoing = closing.enter_context(socket.socket())
            if same_host:
                _choose_congestion(outgoing)
            outgoing.settimeout(TIMEOUT_S)
            following = (comm.rank + 1) % comm.world_size
            outgoing.connect((addresses[following], ports[following]))
            ends.append(outgoing)
        if comm.world_size > 2 or comm.rank == 0:
            ends.append(closing.enter_context(server.accept()[0]))
        if comm.world_size == 2:
            ends.append(closing.enter_context(ends[0].dup()))
    return Link(*ends, same_host=same_host)


def _choose_congestion(end: socket.socket) -> None:
    """Chooses reno as gradring does inside a host, unless the setting keeps the system's."""
    if os.environ.get("GRADRING_TCP_CONGESTION") != "system":
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


class Exchange(LocalReduction):
    """One exchange on every link of the ring.

    Each rank sends ``count`` bytes, repeating one block of ``block_bytes``, and receives as many
    into another block of this size, which is the result.
    """

    def __init__(
        self, link: Link, rank: int, world_size: int, count: int, block_bytes: int
    ) -> None:
        block = min(count, block_bytes)
        super().__init__(_block((rank - 1) % world_size, block))
        self._link = link
        self._count = count
        self._sent = _block(rank, block)
        self._received = np.empty_like(self._sent)

    def reset(self) -> None:
        """Overwrites the bytes received last."""
        self._received.fill(255)

    def run(self) -> None:
        """Runs one exchange."""
        self._link.exchange(self._sent.data, self._received.data, self._count)

    def result(self) -> NDArray[Any]:
        """Returns the last block received."""
        return self._received


def open_link(comm: Communicator, closing: contextlib.ExitStack) -> Sequence[System]:
    """Returns the raw links as systems, if there are several ranks.

    They move as many bytes as a ring all-reduce, in turns with the other systems.
    """
    if comm.world_size == 1:
        return []
    link = open_ring(comm, closing)

    def prepare(block_bytes: int | None, problem: Problem) -> Exchange | None:
        if problem.bytes < LEAST_BYTES:
            return None
        block = block_bytes or problem.bytes
        return Exchange(link, problem.rank, problem.world_size, problem.link_bytes, block)

    blocks = {NAME: None, CACHED_NAME: CACHED_BYTES}
    return [
        System(name, "tcp", partial(prepare, block), lambda: "none")
        for name, block in blocks.items()
    ]


def _block(rank: int, count: int) -> NDArray[np.uint8]:
    return np.resize((np.arange(256) * 7 + rank).astype(np.uint8) % 251, count)


def _part(block: memoryview, done: int, left: int) -> memoryview:
    start = done % len(block)
    return block[start : start + left]
