"""Surroundings of this process: its cluster, settings, interface and versions."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib import metadata

import gradring
from gradring.clusters import Cluster, detect
from gradring.clusters.own_host import address_towards
from gradring.config.settings import PREFIX, SETTINGS
from gradring.config.values import Settings
from gradring.config.words import ALIKE, did_you_mean, meant
from gradring.machine.interfaces import interface_of

PACKAGES = ("numpy", "tensorflow", "tensorflow-cpu", "keras", "keras-nightly", "tf_keras")


def decision() -> list[tuple[str, str]]:
    """Returns the cluster that ``init()`` would join, with the reason, as names and texts.

    Raises:
        ConfigError: The cluster or a setting is invalid.
    """
    cluster = detect()
    settings = Settings.from_environ()
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
        ("timeout", f"{settings.timeout:g} s to form, {settings.stall_timeout:g} s of stall"),
    ]


def variables(environ: Mapping[str, str] = os.environ) -> list[tuple[str, str, str]]:
    """Returns name, value and source of every variable that gradring reads.

    Unknown variables with our prefix follow; perhaps they are misspelt.
    """
    known = [setting.variable for setting in SETTINGS]
    rows = []
    for setting in SETTINGS:
        value = environ.get(setting.variable, "").strip()
        source = "environment" if value else "default" if setting.default else "not set"
        shown = "(secret)" if value and setting.kind == "secret" else value or setting.default
        rows.append((setting.variable, shown or "-", source))
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in known:
            hint = did_you_mean(meant(name, known, ALIKE, prefix=PREFIX))
            rows.append((name, "(set)", f"environment, but nothing reads it{hint}"))
    return rows


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
    """Returns the versions of gradring, Python, the kernel and relevant packages, by name."""
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
    """Returns the local address and interface towards ``host:port``, or the reason for none."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        own = address_towards(host)
    except OSError as error:
        return f"unknown: {host} cannot be resolved or routed to ({error.strerror})"
    return f"{own} ({interface_of(own) or 'of no known interface'})"
