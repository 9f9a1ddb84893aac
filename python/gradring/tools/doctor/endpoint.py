"""Reachability of a ``host:port`` from here, and where it fails."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass

LIMIT_S = 5.0


@dataclass(frozen=True)
class Endpoint:
    """What was found out about one address.

    Attributes:
        text: ``host:port`` as it was given.
        resolved: The addresses of the host; empty when it has none.
        connect_s: Time to open a connection, in seconds; None when that failed.
        problem: Why it cannot be reached, or None.
    """

    text: str
    resolved: list[str]
    connect_s: float | None
    problem: str | None


def probe(address: str) -> Endpoint:
    """Resolves and connects to ``host:port``."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        problem = f"the name {host!r} has no address here ({error.strerror}); check DNS, /etc/hosts"
        return Endpoint(address, [], None, problem)
    resolved = list(dict.fromkeys(str(entry[4][0]) for entry in found))
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
