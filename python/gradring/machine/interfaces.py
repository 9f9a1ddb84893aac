"""Network interfaces of this host."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

from gradring.errors import ConfigError

#: Linux's ioctl request for the IPv4 address of an interface.
SIOCGIFADDR = 0x8915
_NAME_BYTES = 16
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")


def address_of(text: str, name: str) -> str:
    """Returns the IP address of an interface, given by name, such as ``eth0``, or by address.

    The IPv4 address is preferred if the interface has both kinds.

    Args:
        text: Name or IP address.
        name: Setting with the text, for messages.

    Raises:
        ConfigError: There is no such interface, or it has no address.
    """
    try:
        return str(ipaddress.ip_address(str(text)))  # str: a number would also be an address
    except ValueError:
        pass
    names = [interface for _, interface in socket.if_nameindex()]
    if text not in names:
        raise ConfigError(
            f"{name}={text!r} is neither an IP address nor one of this host's network interfaces "
            f"({', '.join(names)}); correct it"
        )
    address = _ipv4(text) or _ipv6(text)
    if address is None:
        raise ConfigError(f"{name}={text!r} has no IP address; choose another interface")
    return address


def interface_of(address: str) -> str | None:
    """Returns the name of the interface with this IP address, or None."""
    own = ipaddress.ip_address(address)
    if own.is_loopback:
        return "lo"
    if own.version == 6:
        return next((name for found, name in _ipv6_addresses() if found == own), None)
    names = (interface for _, interface in socket.if_nameindex())
    return next((name for name in names if _ipv4(name) == address), None)


def _ipv4(interface: str) -> str | None:
    request = struct.pack(f"{2 * _NAME_BYTES}s", interface.encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, SIOCGIFADDR, request)
        except OSError:
            return None
    # Layout: name, family and port of a socket address, address.
    return socket.inet_ntoa(answer[_NAME_BYTES + 4 : _NAME_BYTES + 8])


def _ipv6(interface: str) -> str | None:
    found = (address for address, name in _ipv6_addresses() if name == interface)
    return next((str(address) for address in found if not address.is_link_local), None)


def _ipv6_addresses() -> list[tuple[ipaddress.IPv6Address, str]]:
    """Returns all IPv6 addresses of this host, each with its interface."""
    try:
        rows = [row.split() for row in _IPV6_ADDRESSES.read_text().splitlines()]
    except OSError:
        return []
    return [(ipaddress.IPv6Address(bytes.fromhex(row[0])), row[-1]) for row in rows]
