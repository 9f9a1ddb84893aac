"""The ``gradring`` command: one file per sub-command, and ``arguments`` for several of them.

Each module in `COMMANDS` has ``NAME``, ``HELP``, ``add_arguments(parser)`` and
``run(arguments) -> exit code``, and does its heavy imports inside ``run``. Only the chosen one is
imported, so that ``gradring run`` starts at once.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import re
import sys
from collections.abc import Sequence
from typing import NoReturn, Protocol, cast

import gradring
from gradring.errors import GradringError

#: Names of the sub-commands and of their modules in this package, in the order of the help.
COMMANDS = ("run", "env", "doctor", "bench", "simulate", "demo", "explain")

USAGE_ERROR = 2


class Command(Protocol):
    """What a module of this package provides."""

    NAME: str
    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares the command's arguments."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Does it; returns the exit code."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code: 2 for wrong usage or configuration."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    chosen = arguments[0] if arguments and arguments[0] in COMMANDS else None
    parser = _parser([chosen] if chosen else COMMANDS)
    if not arguments or (chosen is None and not arguments[0].startswith("-")):
        if arguments:
            print(f"gradring: there is no command {arguments[0]!r}", file=sys.stderr)
        parser.print_help(sys.stderr)
        return USAGE_ERROR
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        _refuse(parsed.parser, unknown)
    try:
        return cast(int, parsed.run(parsed))
    except GradringError as error:
        print(f"gradring {parsed.command}: {error}", file=sys.stderr)
        return USAGE_ERROR if isinstance(error, ValueError) else 1


def _parser(names: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradring",
        description="Ring all-reduce for TensorFlow: start ranks, look at the cluster, measure.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"gradring {gradring.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in names:
        command = cast(Command, importlib.import_module(f"{__name__}.{name}"))
        sub = commands.add_parser(
            command.NAME, help=command.HELP, description=command.HELP, allow_abbrev=False
        )
        command.add_arguments(sub)
        sub.set_defaults(run=command.run, parser=sub)
    return parser


def _refuse(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> NoReturn:
    """Shows the usage of the command itself, and the option that is nearest."""
    options = re.findall(r"--[a-z-]+", parser.format_help())
    near = difflib.get_close_matches(unknown[0].partition("=")[0], options, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
