"""``gradring demo``: two workers train on real data on this machine."""

from __future__ import annotations

import argparse
import signal
import sys
from functools import partial
from pathlib import Path
from typing import NoReturn

from gradring.machine.streams import print_error
from gradring.tools.cli.arguments import OUTPUT_ERRORS, make_directory, option

NAME = "demo"
HELP = "train on real data with 2 ranks, check the result, and compare it with TensorFlow's own"
EXAMPLE = "gradring demo --report report"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the directory of the report, and the other demos."""
    from gradring.tools.demo.rules import RULES

    option(parser, "--report DIR", Path, default=Path("demo-report"))(
        "directory for the picture and the logs; with --slow-rank or --kill, it gets the logs, the "
        "times of all steps and the flight records (default %(default)s)"
    )
    trouble = partial(option, parser.add_mutually_exclusive_group())
    trouble("--slow-rank R", int, choices=(0, 1))(
        "instead, make one rank slow and show that it is named"
    )
    trouble("--kill R", int, choices=range(4))(
        "instead, kill one of 4 ranks in the middle; the others continue, and another one joins"
    )
    trouble("--update RULE", choices=tuple(RULES))(
        "instead, train with 3 ranks and an update rule, such as all-reduce or diloco"
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the demo; returns 1 if its checks fail."""
    from gradring.tools.demo.rules import show_rule
    from gradring.tools.demo.story import demo
    from gradring.tools.demo.trouble import show_killed_rank, show_slow_rank

    make_directory("--report", arguments.report)
    # SIGTERM then raises SystemExit, so that the trainings are ended too.
    signal.signal(signal.SIGTERM, _exit)
    try:
        if arguments.slow_rank is not None:
            return show_slow_rank(arguments.slow_rank, arguments.report)
        if arguments.update is not None:
            return show_rule(arguments.update, arguments.report)
        if arguments.kill is not None:
            return show_killed_rank(arguments.kill, arguments.report)
        return demo(arguments.report)
    except OSError as error:
        if error.errno in OUTPUT_ERRORS:
            raise
        print_error(f"gradring demo: {error}")
        return 1


def _exit(signum: int, _frame: object) -> NoReturn:
    sys.exit(128 + signum)
