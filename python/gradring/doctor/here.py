"""What this process would do: its cluster and why, its interface, its versions."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import platform
import socket
import struct
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import gradring
from gradring.clusters import Cluster, detect
from gradring.config import Settings
from gradring.launch.hosts import address_towards

PACKAGES = ("numpy", "tensorflow", "tensorflow-cpu", "keras", "tf_keras")
SIOCGIFADDR = 0x8915
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")


def decision(environ: Mapping[str, str] = os.environ) -> list[tuple[str, str]]:
    """The cluster that ``init()`` would join, and why, as names and texts.

    Raises:
        ConfigError: The cluster or a setting cannot be used.
    """
    cluster = detect(environ)
    settings = Settings.from_environ(environ)
    several = cluster.world_size > 1
    return [
        ("rank", str(cluster.rank)),
        ("world size", str(cluster.world_size)),
        ("rendezvous", cluster.rendezvous if several else "not needed"),
        ("interface", interface_towards(cluster.rendezvous) if several else "not needed"),
        ("listens at", _listens_at(cluster, settings)),
        ("job", cluster.job_id or "no name"),
        ("found in", cluster.source),
        ("because", cluster.reason),
        ("token", "set" if settings.token else "none"),
        ("TLS", f"with {settings.tls.cert}" if settings.tls else "none"),
        ("transport", settings.transport),
        ("streams", str(settings.streams)),
        ("checksum", "on" if settings.checksum else "off"),
        ("timeout", f"{settings.timeout:g} s to form, {settings.stall_timeout:g} s of standstill"),
    ]


def _listens_at(cluster: Cluster, settings: Settings) -> str:
    if cluster.listen is not None:
        return cluster.listen
    if cluster.rank == 0 and cluster.world_size > 1:
        return cluster.rendezvous
    if settings.port is None:
        return "a free port"
    first, last = settings.port
    return f"port {first}" if first == last else f"a free port from {first} to {last}"


def versions() -> dict[str, str]:
    """Versions of what takes part in a collective, by name."""
    found = {
        "gradring": gradring.__version__,
        "Python": platform.python_version(),
        "kernel": platform.release(),
    }
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def interface_towards(address: str) -> str:
    """The address and the interface from which ``host:port`` is reached, or why it is not."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        own = address_towards(host)
    except OSError as error:
        return f"unknown: {host} cannot be resolved or routed to ({error.strerror})"
    return f"{own} ({_interface_of(own) or 'of no known interface'})"


def _interface_of(address: str) -> str | None:
    own = ipaddress.ip_address(address)
    if own.is_loopback:
        return "lo"
    if own.version == 6:
        rows = [line.split() for line in _IPV6_ADDRESSES.read_text().splitlines()]
        return next((row[-1] for row in rows if int(row[0], 16) == int(own)), None)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(asking, SIOCGIFADDR, request)
            except OSError:
                continue  # it has no IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
