"""``gradring demo``: two workers train on real data on this machine."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import NoReturn

NAME = "demo"
HELP = "train on real data with 2 ranks, check the result, and compare it with TensorFlow's own"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares where the report goes."""
    parser.add_argument(
        "--report",
        type=Path,
        default=Path("demo-report"),
        metavar="DIR",
        help="directory for the picture and the logs (default %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the demo; returns 1 when its checks fail."""
    from gradring.demo import demo

    # As an exception it ends the trainings too.
    signal.signal(signal.SIGTERM, _exit)
    try:
        return demo(arguments.report)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except OSError as error:
        print(f"gradring demo: {error}", file=sys.stderr)
        return 1


def _exit(signum: int, _frame: object) -> NoReturn:
    sys.exit(128 + signum)
