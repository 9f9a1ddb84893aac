"""``gradring env``: the cluster that ``gradring.init()`` would join, with the reason."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from gradring.tools.cli.arguments import say

NAME = "env"
HELP = "print the cluster that gradring.init() would join, and why; and all settings"
EXAMPLE = "gradring env"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares nothing: the command has no arguments."""


def run(arguments: argparse.Namespace) -> int:
    """Prints the decision and all settings; a `ConfigError` is passed on."""
    from gradring.tools.doctor import seams
    from gradring.tools.doctor.here import decision, variables

    try:
        for name, text in decision():
            say(f"{name:<12}{text}")
    finally:  # especially useful if a setting is wrong
        _print_table([("variable", "value", "from"), *variables()])
    found = seams.lines()
    if found:
        say()
    for line in found:
        say(line)
    return 0


def _print_table(rows: Sequence[tuple[str, str, str]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    say()
    for variable, value, source in rows:
        say(f"{variable:<{widths[0]}}  {value:<{widths[1]}}  {source}")
