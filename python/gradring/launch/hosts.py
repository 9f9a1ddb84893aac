"""The hosts of ``gradring run --hosts h1:2,h2:2``, and the placement of ranks on them."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

from gradring.clusters.own_host import address_towards, is_own, reachable_host
from gradring.config.parse import MAX_PORT, shown, whole_number
from gradring.config.words import counted
from gradring.machine.ports import LOOPBACK


@dataclass(frozen=True)
class Host:
    """One host and its number of ranks.

    Attributes:
        target: Argument of ssh: a name or an address, perhaps with ``user@`` in front.
        slots: Number of ranks, at least 1.
        port: Port of its ssh server; None: ssh's default.
    """

    target: str
    slots: int
    port: int | None = None

    @property
    def name(self) -> str:
        """The name or address without the user."""
        return self.target.rpartition("@")[2]

    @property
    def is_local(self) -> bool:
        """True if the host is this machine, by any name or address; ranks then start without ssh.

        A target with ``user@`` always uses ssh, since the user can be another one.
        """
        return self.target == self.name and _is_this_machine(self.name)

    def is_same_machine(self, other: Host) -> bool:
        """Returns True if both are one machine, also for two names of this machine."""
        return self.name == other.name or (self.is_local and other.is_local)


@lru_cache(maxsize=4096)  # more hosts than a group may have ranks
def _is_this_machine(name: str) -> bool:
    return name in ("localhost", socket.gethostname()) or is_own(name)


THIS_HOST = Host("localhost", 1)


def parse_hosts(text: str) -> list[Host]:
    """Reads ``h1:2,user@h2,[fd00::7]:2``; a host without a number gets one rank.

    Raises:
        ValueError: An entry is malformed, or a host is named twice.
    """
    hosts = [parse_host(entry.strip()) for entry in text.split(",")]
    for host in hosts:
        if sum(other.name == host.name for other in hosts) > 1:
            raise ValueError(f"{host.name!r} is named twice; write {host.name}:N once")
    return hosts


def parse_host(entry: str, slots: str | None = None) -> Host:
    """Reads one host.

    Args:
        entry: Text such as ``node-a``, ``user@node-a:2`` or ``[fd00::7]:2``.
        slots: The number of ranks, if not in `entry`. Default: 1.

    Raises:
        ValueError: The host is malformed, or its number of ranks is invalid or given twice.
    """
    target, tail = _without_slots(entry)
    name = target.rpartition("@")[2]
    malformed = not name or set(name) & set("[]/=,") or len(target.split()) != 1
    # A name that begins with a dash would be an option of ssh.
    if (
        malformed
        or not target.isprintable()
        or target.startswith(("-", "@"))
        or (tail and not tail.startswith(":"))
    ):
        raise ValueError(f"{shown(entry)} is not a host such as node-a:2")
    if tail and slots is not None:
        raise ValueError(f"{entry!r} has its number of ranks twice; write it once")
    number = tail[1:] if tail else slots if slots is not None else "1"
    try:
        return Host(target, whole_number(number, "slots", minimum=1))
    except ValueError:
        raise ValueError(
            f"{shown(entry)} has {shown(number)} ranks; write {name}:N with N of at least 1"
        ) from None


def name_of_this_machine(hosts: Sequence[Host], environ: Mapping[str, str], *, alone: bool) -> str:
    """Returns the name or address at which processes on all hosts reach this machine.

    Args:
        hosts: All known hosts.
        environ: Variables that can choose a network.
        alone: True if no other hosts will be added.
    """
    others = [host for host in hosts if not host.is_local]
    if others:
        return address_towards(others[0].name)
    return LOOPBACK if alone else reachable_host(environ, None)


def parse_port(text: str, name: str) -> int:
    """Reads a port; ``name`` is its source, for messages.

    Raises:
        ValueError: The text is not a port.
    """
    return whole_number(text, name, minimum=1, maximum=MAX_PORT)


def _without_slots(entry: str) -> tuple[str, str]:
    """Splits an entry into the target and the rest: a colon and a number of ranks, or nothing."""
    user, at, rest = entry.rpartition("@")
    if rest.startswith("[") and "]" in rest:
        name, _, tail = rest[1:].partition("]")
    elif rest.count(":") > 1:  # an IPv6 address
        name, tail = rest, ""
    else:
        name, colon, number = rest.partition(":")
        tail = colon + number
    return f"{user}{at}{name}", tail


def place_ranks(hosts: Sequence[Host], world_size: int) -> list[Host]:
    """Returns the host of each rank; hosts are filled in the given order.

    Raises:
        ValueError: The hosts have fewer slots than ranks.
    """
    slots = (host for host in hosts for _ in range(host.slots))
    placed = list(islice(slots, world_size))
    if len(placed) < world_size:
        raise ValueError(
            f"the hosts have room for {counted(len(placed), 'rank')}, not for {world_size}; "
            "give more, or larger numbers"
        )
    return placed
