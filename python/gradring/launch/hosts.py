"""The hosts of ``gradring run --hosts h1:2,h2:2``, and which rank runs on which of them."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

from gradring.launch.ports import LOOPBACK

LOCAL_NAMES = ("localhost", LOOPBACK, "::1")
ANY_PORT = 9


@dataclass(frozen=True)
class Host:
    """One host and how many ranks it gets.

    Attributes:
        target: What ssh is given: a name or an address, perhaps with ``user@`` in front.
        slots: Number of ranks, at least 1.
    """

    target: str
    slots: int

    @property
    def name(self) -> str:
        """The name or address without the user."""
        return self.target.rpartition("@")[2]

    @property
    def is_local(self) -> bool:
        """Whether it is this machine by its name; ranks are then started without ssh."""
        return self.target in LOCAL_NAMES or self.target == socket.gethostname()


THIS_HOST = Host("localhost", 1)


def parse_hosts(text: str) -> list[Host]:
    """Reads ``h1:2,user@h2,[fd00::7]:2``; a host without a number gets one rank.

    Raises:
        ValueError: An entry is malformed, or a host is named twice.
    """
    hosts = [_parse_host(entry.strip()) for entry in text.split(",")]
    for host in hosts:
        if sum(other.name == host.name for other in hosts) > 1:
            raise ValueError(f"{host.name!r} is named twice; write {host.name}:N once")
    return hosts


def _parse_host(entry: str) -> Host:
    target, slots = entry, "1"
    user, at, rest = entry.rpartition("@")
    if rest.startswith("["):
        address, bracket, tail = rest[1:].partition("]")
        target, slots = f"{user}{at}{address}", tail[1:] if tail else "1"
        malformed = not bracket or (tail != "" and not tail.startswith(":"))
    else:
        if rest.count(":") == 1:
            target, _, slots = entry.rpartition(":")
        malformed = False
    name = target.rpartition("@")[2]
    # A name that begins with a dash would be an option of ssh.
    if malformed or not name or target.startswith("-") or any(c.isspace() for c in target):
        raise ValueError(f"{entry!r} is not a host such as node-a:2")
    if not (slots.isascii() and slots.isdigit()) or int(slots) < 1:
        raise ValueError(f"{entry!r} has {slots!r} ranks; write {name}:N with N of at least 1")
    return Host(target, int(slots))


def place_ranks(hosts: Sequence[Host], world_size: int) -> list[Host]:
    """The host of each rank: they are filled in the order in which they are named.

    Raises:
        ValueError: The hosts have fewer slots than there are ranks.
    """
    slots = [host for host in hosts for _ in range(host.slots)]
    if len(slots) < world_size:
        raise ValueError(
            f"the hosts have room for {len(slots)} ranks, not for {world_size}; give more, or "
            "larger numbers"
        )
    return slots[:world_size]


def address_towards(other: str) -> str:
    """The address of this machine that ``other`` can reach, as the routing table has it.

    Raises:
        OSError: ``other`` has no address, or there is no route to it.
    """
    family, kind, _, _, address = socket.getaddrinfo(other, ANY_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # a datagram socket sends nothing here
        return str(probe.getsockname()[0])
