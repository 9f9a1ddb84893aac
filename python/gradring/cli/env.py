"""``gradring env``: the cluster that ``gradring.init()`` would join from here, and why."""

from __future__ import annotations

import argparse
import os

from gradring.clusters import detect
from gradring.config import Settings

NAME = "env"
HELP = "print the cluster that gradring.init() would join, and why"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """There are none."""


def run(arguments: argparse.Namespace) -> int:
    """Prints the decision; a ConfigError goes to the caller."""
    cluster = detect(os.environ)
    settings = Settings.from_environ(os.environ)
    rows = [
        ("rank", cluster.rank),
        ("world size", cluster.world_size),
        ("rendezvous", cluster.rendezvous if cluster.world_size > 1 else "not needed"),
        ("listens at", cluster.listen or "a free port"),
        ("found in", cluster.source),
        ("because", cluster.reason),
        ("interface", settings.interface or "as above"),
        ("token", "set" if settings.token else "none"),
        ("TLS", f"with {settings.tls.cert}" if settings.tls else "none"),
        ("transport", settings.transport),
        ("timeout", f"{settings.timeout:g} s"),
    ]
    for name, text in rows:
        print(f"{name:<12}{text}")
    return 0
