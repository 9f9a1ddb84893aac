"""The ``gradring`` command: a file for each sub-command, and ``arguments`` with shared code.

Each module in `COMMANDS` has ``NAME``, ``HELP``, ``EXAMPLE``, ``add_arguments(parser)`` and
``run(arguments) -> exit code``, and does its heavy imports inside ``run``. ``EQUIVALENTS`` is
optional, an argument of `Parser`. Only the chosen module is imported, so that ``gradring run``
starts quickly.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import io
import os
import signal
import sys
from collections.abc import Sequence
from typing import Protocol, cast

import gradring
from gradring.config.words import ALIKE, did_you_mean, meant
from gradring.errors import GradringError
from gradring.machine.streams import print_error
from gradring.tools.cli.arguments import OUTPUT_ERRORS, Parser

#: Names of the sub-commands and of their modules in this package, in the order of the help.
COMMANDS = ("run", "verify", "env", "doctor", "bench", "simulate", "demo", "explain")

USAGE_ERROR = 2


class Command(Protocol):
    """The interface of a sub-command's module."""

    NAME: str
    HELP: str
    EXAMPLE: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares the command's arguments."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Runs the command and returns the exit code."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code: 2 for wrong usage or configuration."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, as by >&-
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    if "_ARGCOMPLETE" in os.environ:  # a shell requests completions of the line
        with contextlib.suppress(ImportError):
            importlib.import_module("argcomplete").autocomplete(_parser(COMMANDS))
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.errno not in OUTPUT_ERRORS:
            raise
        # Standard output of a notebook is not a file.
        with open(os.devnull, "wb") as nowhere, contextlib.suppress(io.UnsupportedOperation):
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        if error.errno == errno.EPIPE:  # no reader any more, as in gradring doctor | head -1
            return 128 + signal.SIGPIPE
        print_error(f"gradring: {error}")
        return 1


def _run(arguments: Sequence[str]) -> int:
    chosen = arguments[0] if arguments and arguments[0] in COMMANDS else None
    parser = _parser([chosen] if chosen else COMMANDS)
    if not arguments:
        parser.print_help(sys.stderr)
        return USAGE_ERROR
    if chosen is None and arguments[0] not in parser.options:
        if arguments[0].startswith("-"):
            parser.refuse(arguments[:1])
        near = did_you_mean(meant(arguments[0], COMMANDS, ALIKE))
        parser.error(f"there is no command {arguments[0]!r}{near}")
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        parsed.parser.refuse(unknown)
    try:
        return cast(int, parsed.run(parsed))
    except GradringError as error:
        print_error(f"gradring {parsed.command}: {error}")
        return USAGE_ERROR if isinstance(error, ValueError) else 1
    except KeyboardInterrupt:
        print_error(f"gradring {parsed.command}: interrupted")
        return 128 + signal.SIGINT


def _parser(names: Sequence[str]) -> Parser:
    parser = Parser(
        prog="gradring",
        description="Ring all-reduce for TensorFlow: start ranks, look at the cluster, measure.",
        example="gradring run -np 2 train.py",
    )
    parser.add_argument("--version", action="version", version=f"gradring {gradring.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in names:
        command = cast(Command, importlib.import_module(f"{__name__}.{name}"))
        about = command.HELP
        sub = commands.add_parser(
            command.NAME,
            help=about,
            description=about,
            example=command.EXAMPLE,
            equivalents=getattr(command, "EQUIVALENTS", {}),
        )
        command.add_arguments(sub)
        sub.set_defaults(run=command.run, parser=sub)
    return parser
