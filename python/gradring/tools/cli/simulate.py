"""``gradring simulate``."""

from __future__ import annotations

import argparse
from dataclasses import fields
from functools import partial
from pathlib import Path

from gradring.errors import ConfigError
from gradring.machine import packages
from gradring.tools.cli.arguments import Names, check_file, count, option, say, usage

NAME = "simulate"
HELP = "how long collectives would take on many hosts: the real schedules in virtual time"
EXAMPLE = "gradring simulate --world-size 16..256 --ranks-per-host 8"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the group, its network, and the output."""
    from gradring.tools.bench.options import ALGORITHMS, parse_sizes
    from gradring.tools.simulate import options

    rate, time = usage(options.parse_bytes_per_s), usage(options.parse_time)
    cost = usage(options.parse_s_per_byte)
    default = options.Network()
    shown = {
        "latency_s": f"{default.latency_s * 1e6:g}us",
        "bytes_per_s": f"{default.bytes_per_s * 8 / 1e9:g}gbit",
        "local_latency_s": f"{default.local_latency_s * 1e6:g}us",
        "local_bytes_per_s": f"{default.local_bytes_per_s * 8 / 1e9:g}gbit",
        "message_s": f"{default.message_s * 1e6:g}us",
        "copy_s_per_byte": f"{8 / default.copy_s_per_byte / 1e9:.3g}gbit",
        "fold_s_per_byte": f"{8 / default.fold_s_per_byte / 1e9:.3g}gbit",
    }
    add = partial(option, parser.add_argument_group("hosts and what is between them"))
    for head, dest, kind, text in (
        ("--ranks-per-host K", "ranks_per_host", count("ranks"), "ranks on each host"),
        ("--latency TIME", "latency_s", time, "between hosts, such as 20us"),
        ("--bandwidth RATE", "bytes_per_s", rate, "of a host's line each way, such as 10gbit"),
        ("--local-latency TIME", "local_latency_s", time, "between ranks of a host"),
        ("--local-bandwidth RATE", "local_bytes_per_s", rate, "of a rank inside its host"),
        ("--uplink RATE", "uplink_bytes_per_s", rate, "of a rack to others, each way"),
        ("--hosts-per-rack H", "hosts_per_rack", count("hosts"), "that share an uplink"),
        ("--cores C", "cores", count("cores"), "of each host (default: one for each rank)"),
        ("--message-cost TIME", "message_s", time, "of a processor to send or receive a piece"),
        ("--copy-rate RATE", "copy_s_per_byte", cost, "at which a processor sends or receives"),
        ("--fold-rate RATE", "fold_s_per_byte", cost, "at which a processor reduces"),
    ):
        add(head, kind, dest=dest, default=getattr(default, dest))(
            f"{text} (default {shown[dest]})" if dest in shown else text
        )
    add = partial(option, parser.add_argument_group("what is simulated, and what is written"))
    add("--world-size N", usage(options.parse_world_sizes), dest="world_sizes", default="2..64")(
        "numbers of ranks: 8, 2,4,8 or 16..4096, which doubles (default %(default)s)"
    )
    add("--collective NAME", choices=options.COLLECTIVES, default=options.ALL_REDUCE)(
        f"{' or '.join(options.COLLECTIVES)} (default %(default)s)"
    )
    add("--splits PARTS", usage(options.parse_splits))(
        "what each rank gets of every rank's buffer in all_to_all, as parts in relation to each "
        "other, again and again for more ranks: 3,1 gives even ranks three times as much as odd "
        "ones, and 1,0,0,0 gives rank 0 of 4 everything (default 1: equal parts)"
    )
    straggler = usage(options.parse_straggler)
    add("--straggler RANK:FACTOR", straggler, dest="stragglers", action="append", default=[])(
        "a rank that needs FACTOR times as long for everything; may be repeated"
    )
    add("--sizes SIZES", usage(parse_sizes), default=options.DEFAULT_SIZES)(
        "bytes on each rank, such as 4KiB,1MiB (default %(default)s)"
    )
    algorithms = Names(ALGORITHMS, "algorithm {}")
    add("--algorithm NAMES", algorithms, dest="algorithms", default="auto")(
        f"each simulated: {', '.join(ALGORITHMS)} (default auto, as a group chooses)"
    )
    add("--json FILE", Path)("write all rows to FILE too")
    add("--picture FILE", Path)("draw time over ranks into a PNG (matplotlib)")


def run(arguments: argparse.Namespace) -> int:
    """Simulates, prints, and writes the requested files."""
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
        arguments.collective,
        arguments.splits,
    )
    options.check()
    if arguments.json is not None:
        check_file("--json", arguments.json)
    if arguments.picture is not None:
        _check_picture(arguments.picture)
    rows = simulate(options, say)
    if arguments.json is not None:
        write(rows, options.network, arguments.json)
    if arguments.picture is not None:
        from gradring.tools.simulate.picture import draw

        draw(rows, arguments.picture)
        say(f"# picture: {arguments.picture}")
    return 0


def _check_picture(path: Path) -> None:
    if missing := packages.missing(["matplotlib"]):
        raise ConfigError(
            f"--picture needs matplotlib; type: {packages.advice(missing)}, or omit --picture"
        )
    check_file("--picture", path)
