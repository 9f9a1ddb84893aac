"""By which name or address the other hosts reach this one."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Mapping
from pathlib import Path

from gradring.config import parse
from gradring.errors import ConfigError

LOOPBACK = "127.0.0.1"
# For documentation only (RFC 5737, RFC 3849): the way there is the way to anywhere.
_ANYWHERE = ("192.0.2.1", "2001:db8::1")
ANY_PORT = 9


def free_address(environ: Mapping[str, str], name: str | None, *, alone: bool) -> str:
    """``host:port`` for rank 0 to listen at, to be told to the others.

    Args:
        environ: ``GRADRING_INTERFACE`` chooses the network, ``GRADRING_PORT`` the port.
        name: The launcher's name for this host, if it has one.
        alone: Whether all ranks are on this host.

    Raises:
        ConfigError: The interface, or the host's name, is not this host's.
        OSError: There is no free port.
    """
    host = local_host(environ) if alone else reachable_host(environ, name)
    if not is_own(host):
        raise ConfigError(
            f"rank 0 cannot listen at {host}, which is no address of its host, "
            f"{socket.gethostname()}; set GRADRING_INTERFACE, or {parse.RENDEZVOUS} for all ranks"
        )
    from gradring.machine.ports import free_ports  # which few ranks need

    return parse.joined_address(host, parse.first_port(environ, 0) or free_ports(1, host)[0])


def local_host(environ: Mapping[str, str]) -> str:
    """Where rank 0 listens for ranks of its own host: the chosen interface, or loopback."""
    return _chosen(environ) or LOOPBACK


def reachable_host(environ: Mapping[str, str], name: str | None) -> str:
    """The chosen interface's address, else the host's name unless it means the host to itself."""
    chosen = _chosen(environ)
    if chosen is not None:
        return chosen
    name = name or socket.gethostname()
    return name if _is_reachable(name) else _address_towards_anywhere() or name


def is_own(host: str) -> bool:
    """Whether ``host`` is an address of this host, or a name of one."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
        if not _binds_to_any(family):
            return True
        own = str(address[0])
        is_loopback = ipaddress.ip_address(own.partition("%")[0]).is_loopback
        return is_loopback or address_towards(own) == own
    except (OSError, UnicodeError):
        return False


def _binds_to_any(family: int) -> bool:
    """Whether sockets can be bound to addresses of other hosts, as load balancers want it."""
    version = "ipv6" if family == socket.AF_INET6 else "ipv4"
    try:
        return Path(f"/proc/sys/net/{version}/ip_nonlocal_bind").read_text().strip() != "0"
    except OSError:
        return False


def _chosen(environ: Mapping[str, str]) -> str | None:
    interface = parse.value(environ, "GRADRING_INTERFACE")
    if interface is None:
        return None
    from gradring.machine.interfaces import address_of  # which few ranks need

    return address_of(interface, "GRADRING_INTERFACE")


def _is_reachable(name: str) -> bool:
    """Whether ``name`` has addresses, and none that is this host's for itself only.

    Debian maps a host's own name to 127.0.1.1.
    """
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return not any(ipaddress.ip_address(row[4][0]).is_loopback for row in found)


def address_towards(other: str) -> str:
    """The address of this machine that ``other`` can reach, as the routing table has it.

    Raises:
        gaierror: ``other`` has no address.
        OSError: There is no route to it.
    """
    try:
        found = socket.getaddrinfo(other, ANY_PORT, type=socket.SOCK_DGRAM)
    except socket.gaierror as error:
        raise socket.gaierror(error.errno, f"{error.strerror}: {other}") from error
    family, kind, _, _, address = found[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # a datagram socket sends nothing here
        return str(probe.getsockname()[0])


def _address_towards_anywhere() -> str | None:
    for address in _ANYWHERE:
        with contextlib.suppress(OSError):
            return address_towards(address)
    return None
