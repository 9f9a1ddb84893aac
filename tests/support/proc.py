"""Facts from Linux about this process, most of them in /proc."""

from __future__ import annotations

import os
import socket
from pathlib import Path

LISTEN, CLOSE_WAIT, ESTABLISHED = "0A", "08", "01"
"""States as /proc/net/tcp writes them; in the second, the peer alone has closed its end."""


def has_ipv6() -> bool:
    """Whether the loopback interface has ::1."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def descriptors() -> list[str]:
    """What the open files are, such as ``socket:[4711]``."""
    targets = []
    for number in os.listdir("/proc/self/fd"):
        try:
            targets.append(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:  # that of the listing itself
            continue
    return targets


def tcp_sockets(state: str) -> list[tuple[str, int]]:
    """The local addresses of this process's TCP sockets in a state, IPv4 and IPv6."""
    own, found = set(descriptors()), []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        path = Path(f"/proc/self/net/{table}")
        for row in path.read_text().splitlines()[1:] if path.exists() else []:
            columns = row.split()
            if columns[3] == state and f"socket:[{columns[9]}]" in own:
                host, port = columns[1].split(":")
                words = bytes.fromhex(host)
                packed = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                found.append((socket.inet_ntop(family, packed), int(port, 16)))
    return found
