"""``gradring simulate``."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from dataclasses import fields
from pathlib import Path

from gradring.errors import ConfigError
from gradring.tools.cli.arguments import check_file, count, say, usage

NAME = "simulate"
HELP = "how long all-reduces would take on many hosts: the real schedules in virtual time"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the group, what is between its ranks, and what is shown."""
    from gradring.tools.bench.options import ALGORITHMS, parse_sizes
    from gradring.tools.simulate import options

    rate, time = usage(options.parse_bytes_per_s), usage(options.parse_time)
    cost = usage(options.parse_s_per_byte)
    default = options.Network()
    for option, dest, kind, metavar, text in (
        ("--ranks-per-host", "ranks_per_host", count("ranks"), "K", "ranks on each host"),
        ("--latency", "latency_s", time, "TIME", "between hosts, such as 20us"),
        ("--bandwidth", "bytes_per_s", rate, "RATE", "of a host's line each way, such as 10gbit"),
        ("--local-latency", "local_latency_s", time, "TIME", "between ranks of a host"),
        ("--local-bandwidth", "local_bytes_per_s", rate, "RATE", "of a rank inside its host"),
        ("--uplink", "uplink_bytes_per_s", rate, "RATE", "of a rack to others, each way"),
        ("--hosts-per-rack", "hosts_per_rack", count("hosts"), "H", "that share an uplink"),
        ("--cores", "cores", count("cores"), "C", "of each host (default: one for each rank)"),
        ("--message-cost", "message_s", time, "TIME", "of a processor to send or receive a piece"),
        ("--copy-rate", "copy_s_per_byte", cost, "RATE", "at which a processor sends or receives"),
        ("--fold-rate", "fold_s_per_byte", cost, "RATE", "at which a processor reduces"),
    ):
        parser.add_argument(
            option, dest=dest, type=kind, metavar=metavar, help=text, default=getattr(default, dest)
        )
    parser.add_argument(
        "--world-size",
        dest="world_sizes",
        type=usage(options.parse_world_sizes),
        default="2..64",
        metavar="N",
        help="numbers of ranks: 8, 2,4,8 or 16..4096, which doubles (default %(default)s)",
    )
    parser.add_argument(
        "--straggler",
        dest="stragglers",
        type=usage(options.parse_straggler),
        action="append",
        default=[],
        metavar="RANK:FACTOR",
        help="a rank that needs FACTOR times as long for everything; may be repeated",
    )
    parser.add_argument(
        "--sizes",
        type=usage(parse_sizes),
        default=options.DEFAULT_SIZES,
        help="bytes on each rank, such as 4KiB,1MiB (default %(default)s)",
    )
    parser.add_argument(
        "--algorithm",
        dest="algorithms",
        type=usage(options.parse_algorithms),
        default="auto",
        metavar="NAMES",
        help=f"each simulated: {', '.join(ALGORITHMS)} (default auto, as a group chooses)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows to FILE too")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="draw time over ranks into a PNG (matplotlib)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Simulates and prints."""
    from gradring.tools.simulate.options import Network, Options
    from gradring.tools.simulate.simulation import simulate, write

    given = vars(arguments)
    given["stragglers"] = tuple(arguments.stragglers)
    names = {field.name for field in fields(Network)} - {"world_size"}
    options = Options(
        arguments.world_sizes,
        arguments.sizes,
        arguments.algorithms,
        Network(**{name: given[name] for name in names}),
    )
    options.check()
    if arguments.json is not None:
        check_file("--json", arguments.json)
    if arguments.picture is not None:
        _check_picture(arguments.picture)
    rows = simulate(options, say)
    try:
        if arguments.json is not None:
            write(rows, options.network, arguments.json)
        if arguments.picture is not None:
            from gradring.tools.simulate.picture import draw

            draw(rows, arguments.picture)
            say(f"# picture: {arguments.picture}")
    except OSError as error:  # the disk is full
        print(f"gradring simulate: {error}", file=sys.stderr)
        return 1
    return 0


def _check_picture(path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "--picture needs matplotlib; type: pip install 'gradring[demo]', or omit --picture"
        )
    check_file("--picture", path)
