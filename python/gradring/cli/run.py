"""``gradring run -np N -- CMD...``."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from gradring.launch.launcher import DEFAULT_GRACE_S, launch

NAME = "run"
HELP = "start N ranks of a program on this machine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the number of ranks, the options and the command."""
    parser.usage = "gradring run -np N [--log-dir DIR] [--grace SECONDS] [--] COMMAND..."
    parser.add_argument(
        "-np", type=_count, required=True, metavar="N", dest="world_size", help="number of ranks"
    )
    parser.add_argument(
        "--log-dir",
        type=Path,
        metavar="DIR",
        help="also write each rank's output to DIR/rank-0.log and so on",
    )
    parser.add_argument(
        "--grace",
        type=_seconds,
        default=DEFAULT_GRACE_S,
        metavar="SECONDS",
        help="how long the other ranks may go on when one has failed (default %(default)g)",
    )
    parser.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="COMMAND", help="such as: python train.py"
    )


def run(arguments: argparse.Namespace) -> int:
    """Launches the ranks; returns the exit code of the first that fails, or 0."""
    command: list[str] = arguments.program
    if command[:1] == ["--"]:
        command = command[1:]
    if not command:
        print(
            "gradring run: there is no command; write gradring run -np 2 python train.py",
            file=sys.stderr,
        )
        return 2
    try:
        return launch(
            command,
            arguments.world_size,
            log_dir=arguments.log_dir,
            grace_s=arguments.grace,
        )
    except OSError as error:
        print(f"gradring run: the ranks cannot be started: {error}", file=sys.stderr)
        return 1


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks of at least 1")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds >= 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds of at least 0")
    return seconds
