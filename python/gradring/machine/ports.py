"""Free ports for ranks on this machine."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

LOOPBACK = "127.0.0.1"
LOWEST_PORT = 10240
DEFAULT_EPHEMERAL_START = 32768
#: Number of random ports tried before the kernel chooses one.
ATTEMPTS = 1000

_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(
    count: int, host: str = LOOPBACK, *, held: contextlib.ExitStack | None = None
) -> list[int]:
    """Returns different ports on ``host`` that no process listens on now.

    The ports are below the range that the kernel uses for outgoing connections. So no process gets
    one by chance before the rank binds it.

    Args:
        count: Number of ports.
        host: Address of this machine on which the ports must be free.
        held: Stack that reserves the ports until it is closed: ranks can listen on them, other jobs
            cannot choose them.

    Raises:
        OSError: There are not enough free ports.
    """
    ports: list[int] = []
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    with contextlib.ExitStack() as tried:
        for candidate in [*_candidates(), *[0] * count]:
            if len(ports) == count:
                break
            holder = tried.enter_context(socket.socket(family))
            try:
                holder.bind((host, candidate))
            except OSError:
                continue
            ports.append(holder.getsockname()[1])
            if held is not None and _lets_listen(holder, host, ports[-1]):
                held.enter_context(holder.dup())
    if len(ports) < count:
        raise OSError(f"only {len(ports)} of {count} ports on {host} are free; end other jobs")
    return ports


def _lets_listen(holder: socket.socket, host: str, port: int) -> bool:
    """Returns whether this kernel lets others listen on a bound port, as Linux does.

    Both sockets must allow the reuse of addresses. Searches for a free port do not allow it, so
    they skip the port.
    """
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        socket.create_server((host, port), family=holder.family).close()
    except OSError:
        return False
    return True


def _candidates() -> list[int]:
    end = _ephemeral_start()
    span = range(LOWEST_PORT, end)
    return random.SystemRandom().sample(span, min(ATTEMPTS, len(span)))


def _ephemeral_start() -> int:
    try:
        return int(_EPHEMERAL_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return DEFAULT_EPHEMERAL_START
