"""``gradring explain DIR``."""

from __future__ import annotations

import argparse
from pathlib import Path

from gradring.machine.streams import print_error
from gradring.tools.cli.arguments import option, say

NAME = "explain"
HELP = "say what the ranks were doing when they failed or hung, from their flight records"
EXAMPLE = "gradring explain logs/flight"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the directory and the timeline."""
    parser.add_argument(
        "directory",
        type=Path,
        metavar="DIR",
        help="directory of GRADRING_FLIGHT_DIR or of gradring run --log-dir, or FILE.parts of "
        "GRADRING_TRACE=FILE",
    )
    option(parser, "--trace FILE", Path)("also write the records as one timeline")


def run(arguments: argparse.Namespace) -> int:
    """Prints the explanation, and writes the timeline if requested."""
    from gradring.observe import explanation
    from gradring.records import paths, records, timeline

    directories = paths.directories(arguments.directory)
    groups = []
    for directory in directories:
        if len(directories) > 1:
            say(f"{directory}:")
        found = records.read(directory)
        groups.append(found)
        for sentence in explanation.explain(found):
            say(sentence)
    if arguments.trace is not None:
        try:
            timeline.write(arguments.trace, *groups)
        except OSError as error:
            print_error(f"gradring explain: {arguments.trace}: {error.strerror}")
            return 1
        say(f"Timeline: {arguments.trace} (open it at ui.perfetto.dev)")
    return 0
