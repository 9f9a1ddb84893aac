"""``gradring env``: the cluster that ``gradring.init()`` would join from here, and why."""

from __future__ import annotations

import argparse

NAME = "env"
HELP = "print the cluster that gradring.init() would join, and why"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """There are none."""


def run(arguments: argparse.Namespace) -> int:
    """Prints the decision; a `ConfigError` leaves it."""
    from gradring.tools.doctor.here import decision

    for name, text in decision():
        print(f"{name:<12}{text}")
    return 0
