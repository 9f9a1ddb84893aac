"""Free ports for ranks on this machine."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

LOOPBACK = "127.0.0.1"
LOWEST_PORT = 10240
DEFAULT_EPHEMERAL_START = 32768
#: Ports tried at random before the kernel is asked for any.
ATTEMPTS = 1000

_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int, host: str = LOOPBACK) -> list[int]:
    """Different ports on ``host`` that no process listens on now.

    They lie below the range from which the kernel takes ports for outgoing connections, so that
    no process gets one by chance before the rank binds it.

    Raises:
        OSError: There are not enough free ports.
    """
    ports: list[int] = []
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    with contextlib.ExitStack() as held:
        for candidate in [*_candidates(), *[0] * count]:
            if len(ports) == count:
                break
            holder = held.enter_context(socket.socket(family))
            try:
                holder.bind((host, candidate))
            except OSError:
                continue
            ports.append(holder.getsockname()[1])
    if len(ports) < count:
        raise OSError(f"only {len(ports)} of {count} ports on {host} are free; end other jobs")
    return ports


def _candidates() -> list[int]:
    end = _ephemeral_start()
    span = range(LOWEST_PORT, end)
    return random.SystemRandom().sample(span, min(ATTEMPTS, len(span)))


def _ephemeral_start() -> int:
    try:
        return int(_EPHEMERAL_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return DEFAULT_EPHEMERAL_START
