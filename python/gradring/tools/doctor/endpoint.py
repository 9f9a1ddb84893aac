"""Reachability of a ``host:port`` from this machine."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass

LIMIT_S = 5.0


@dataclass(frozen=True)
class Endpoint:
    """The result of a probe of one address.

    Attributes:
        text: ``host:port`` as it was given.
        resolved: The addresses of the host; empty if it has none.
        connect_s: Time to open a connection, in seconds; None if that failed.
        problem: The reason why it cannot be reached, or None.
    """

    text: str
    resolved: list[str]
    connect_s: float | None
    problem: str | None


def is_same(address: str, other: str) -> bool:
    """Returns True if two ``host:port`` resolve to a common address on this machine."""
    if address == other:
        return True
    try:
        return not set(_resolved(address)).isdisjoint(_resolved(other))
    except OSError:
        return False


def _resolved(address: str) -> list[tuple[str, int]]:
    host, _, port = address.rpartition(":")
    found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    return list(dict.fromkeys((str(entry[4][0]), int(port)) for entry in found))


def probe(address: str) -> Endpoint:
    """Resolves ``host:port`` and connects to it."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        resolved = [ip for ip, _ in _resolved(address)]
    except OSError as error:
        problem = f"the name {host!r} has no address here ({error.strerror}); check DNS, /etc/hosts"
        return Endpoint(address, [], None, problem)
    problem = "no address accepts connections"
    for ip in resolved:
        start = time.perf_counter()
        try:
            with socket.create_connection((ip, int(port)), LIMIT_S):
                return Endpoint(address, resolved, time.perf_counter() - start, None)
        except TimeoutError:
            problem = f"{ip} does not answer within {LIMIT_S:g} s; a firewall may drop its packets"
        except ConnectionRefusedError:
            problem = f"{ip} refuses: no process listens at port {port} there"
        except OSError as error:
            problem = f"{ip}: {error.strerror}"
    return Endpoint(address, resolved, None, problem)
