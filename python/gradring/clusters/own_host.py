"""Names and addresses at which other hosts reach this one."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Mapping
from pathlib import Path

from gradring.config import parse
from gradring.errors import ConfigError

LOOPBACK = "127.0.0.1"
# Addresses for documentation (RFC 5737, RFC 3849); their route is the default route.
_ANYWHERE = ("192.0.2.1", "2001:db8::1")
ANY_PORT = 9


def free_address(environ: Mapping[str, str], name: str | None, *, alone: bool) -> str:
    """Returns a free ``host:port`` on which rank 0 can listen, for the other ranks.

    Args:
        environ: ``GRADRING_INTERFACE`` chooses the network, ``GRADRING_PORT`` the port.
        name: The launcher's name for this host, if it has one.
        alone: Whether all ranks are on this host.

    Raises:
        ConfigError: This host has no such interface, or its name belongs to another host.
        OSError: There is no free port.
    """
    host = local_host(environ) if alone else reachable_host(environ, name)
    if not is_own(host):
        raise ConfigError(
            f"rank 0 cannot listen at {host}, which is no address of its host, "
            f"{socket.gethostname()}; set GRADRING_INTERFACE, or {parse.RENDEZVOUS} for all ranks"
        )
    from gradring.machine.ports import free_ports  # few ranks need it

    return parse.joined_address(host, parse.first_port(environ, 0) or free_ports(1, host)[0])


def local_host(environ: Mapping[str, str]) -> str:
    """Returns rank 0's host for ranks of the same host: the chosen interface, or loopback."""
    return _chosen(environ) or LOOPBACK


def reachable_host(environ: Mapping[str, str], name: str | None) -> str:
    """Returns the chosen interface's address, or the host's name unless that means loopback."""
    chosen = _chosen(environ)
    if chosen is not None:
        return chosen
    name = name or socket.gethostname()
    return name if _is_reachable(name) else _address_towards_anywhere() or name


def is_own(host: str) -> bool:
    """Returns whether ``host`` is an address of this host, or a name of one."""
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
    """Returns whether sockets can bind to addresses of other hosts, as load balancers do."""
    version = "ipv6" if family == socket.AF_INET6 else "ipv4"
    try:
        return Path(f"/proc/sys/net/{version}/ip_nonlocal_bind").read_text().strip() != "0"
    except OSError:
        return False


def _chosen(environ: Mapping[str, str]) -> str | None:
    interface = parse.value(environ, "GRADRING_INTERFACE")
    if interface is None:
        return None
    from gradring.machine.interfaces import address_of  # few ranks need it

    return address_of(interface, "GRADRING_INTERFACE")


def _is_reachable(name: str) -> bool:
    """Returns whether ``name`` has addresses, and no loopback address.

    Debian maps a host's own name to 127.0.1.1.
    """
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return not any(ipaddress.ip_address(row[4][0]).is_loopback for row in found)


def address_towards(other: str) -> str:
    """Returns this machine's address on the route to ``other``.

    Raises:
        gaierror: ``other`` has no address.
        OSError: There is no route to ``other``.
    """
    try:
        found = socket.getaddrinfo(other, ANY_PORT, type=socket.SOCK_DGRAM)
    except socket.gaierror as error:
        raise socket.gaierror(error.errno, f"{error.strerror}: {other}") from error
    family, kind, _, _, address = found[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # connect() on UDP sends no packet
        return str(probe.getsockname()[0])


def _address_towards_anywhere() -> str | None:
    for address in _ANYWHERE:
        with contextlib.suppress(OSError):
            return address_towards(address)
    return None
