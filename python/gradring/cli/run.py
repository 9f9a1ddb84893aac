"""``gradring run -np N -- CMD...``, here and over ssh."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gradring.cli.arguments import check_file, make_directory, seconds
from gradring.launch.hosts import Host, parse_hosts
from gradring.launch.launcher import DEFAULT_GRACE_S, launch

NAME = "run"
HELP = "start N ranks of a program, on this machine or on several"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the number of ranks, the options and the command."""
    parser.usage = (
        "gradring run [-np N] [--hosts HOST:RANKS,...] [--max-restarts R] [--log-dir DIR] "
        "[--trace FILE] [--grace SECONDS] [-x NAME[=VALUE]] [--python PATH] [-m] [--] COMMAND..."
    )
    parser.add_argument(
        "-np",
        type=_count,
        metavar="N",
        dest="world_size",
        help="number of ranks; with --hosts, as many as they have room for by default",
    )
    parser.add_argument(
        "--hosts",
        type=_hosts,
        default=[],
        metavar="HOST:RANKS,...",
        help="where the ranks run, such as node-a:2,node-b:2; ssh must reach the others without a "
        "password",
    )
    parser.add_argument(
        "--max-restarts",
        type=_count_or_none,
        default=0,
        metavar="R",
        help="start all ranks again when one has failed, R times at most; GRADRING_RESTART tells "
        "them the attempt (default 0)",
    )
    parser.add_argument(
        "--log-dir",
        type=Path,
        metavar="DIR",
        help="also write each rank's output to DIR/rank-0.log and so on, what a gradring.Monitor "
        "measures to DIR/steps.jsonl, and, when the group fails, what each rank was doing to "
        "DIR/flight",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write a timeline of all ranks' collectives, to open at ui.perfetto.dev",
    )
    parser.add_argument(
        "--grace",
        type=seconds,
        default=DEFAULT_GRACE_S,
        metavar="SECONDS",
        help="how long the other ranks may go on when one has failed (default %(default)g)",
    )
    parser.add_argument(
        "-x",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        dest="forward",
        help="a variable for ranks on other hosts; GRADRING_*, TF_*, KERAS_*, OMP_* and PYTHON* "
        "travel anyway",
    )
    parser.add_argument(
        "--python",
        default=sys.executable,
        metavar="PATH",
        help="the interpreter on other hosts (default: the path of this one)",
    )
    parser.add_argument(
        "-m", action="store_true", dest="module", help="COMMAND is a Python module, as of python -m"
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
        return _misused("there is no command; write gradring run -np 2 python train.py")
    if arguments.module:
        remote = any(not host.is_local for host in arguments.hosts)
        command = [arguments.python if remote else sys.executable, "-m", *command]
    room = sum(host.slots for host in arguments.hosts)
    world_size = arguments.world_size or room
    if not world_size:
        return _misused("the number of ranks is missing; give -np N, or --hosts")
    if room and world_size > room:
        return _misused(f"-np {world_size} is more than the {room} ranks of --hosts")
    if arguments.log_dir is not None:
        make_directory("--log-dir", arguments.log_dir)
    if arguments.trace is not None:
        check_file("--trace", arguments.trace)
    try:
        return launch(
            command,
            world_size,
            log_dir=arguments.log_dir,
            grace_s=arguments.grace,
            hosts=arguments.hosts,
            python=arguments.python,
            forward=arguments.forward,
            max_restarts=arguments.max_restarts,
            trace=arguments.trace,
        )
    except OSError as error:
        print(f"gradring run: the ranks cannot be started: {error}", file=sys.stderr)
        return 1


def _misused(problem: str) -> int:
    print(f"gradring run: {problem}", file=sys.stderr)
    return 2


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks of at least 1")
    return int(text)


def _hosts(text: str) -> list[Host]:
    try:
        return parse_hosts(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _count_or_none(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of restarts")
    return int(text)
