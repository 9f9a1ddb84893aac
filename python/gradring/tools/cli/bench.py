"""``gradring bench all-reduce`` and ``gradring bench link``."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import fields
from functools import partial
from pathlib import Path

from gradring.clusters import outer_place
from gradring.errors import ConfigError
from gradring.machine.streams import print_error
from gradring.tools.cli.arguments import OUTPUT_ERRORS, Names, check_file, count, option, say, usage

NAME = "bench"
HELP = "measure collectives, check every result, compare with other systems"
EXAMPLE = "gradring bench all-reduce --sizes 1MiB"

WRONG_RESULT = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the measurements and their options."""
    kinds = parser.add_subparsers(dest="measured", metavar="WHAT", required=True)
    _add_all_reduce(kinds)
    _add_link(kinds)


def run(arguments: argparse.Namespace) -> int:
    """Measures and prints; returns 1 if a result was wrong or a rank failed."""
    from gradring.testing import RankFailure

    outer = outer_place(os.environ)
    if outer is not None:
        source, place = outer
        size = f" --world-size {place.world_size}" if arguments.measured == "all-reduce" else ""
        raise ConfigError(
            f"this is {place} ({source}), but a benchmark starts its ranks itself, on one machine; "
            f"type, without a launcher: gradring bench {arguments.measured}{size}"
        )
    if arguments.json is not None:
        check_file("--json", arguments.json)
    measure = {"all-reduce": _run_all_reduce, "link": _run_link}[arguments.measured]
    try:
        wrong = measure(arguments)
    except (RankFailure, OSError) as error:
        if isinstance(error, OSError) and error.errno in OUTPUT_ERRORS:
            raise
        print_error(f"gradring bench: {error}")
        return 1
    if wrong:
        print_error(f"gradring bench: {wrong} elements were wrong; see the last column")
        return WRONG_RESULT
    return 0


def _add_all_reduce(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from gradring.gradients.checks import REDUCE_OPS
    from gradring.tools.bench import options, systems, values

    sub = kinds.add_parser(
        "all-reduce",
        help="time, algbw and busbw over size",
        description="Measures all-reduce between ranks of this machine. algbw is bytes over the "
        "median time, in 1e9 bytes/s. busbw is algbw x 2(N-1)/N, the rate of each link. of link is "
        "busbw over the rate of the raw TCP links, from buffer to buffer, measured in turns. cpu "
        "s/GB is the processor time of all ranks for 1e9 bytes of the buffer. p99 needs 100 "
        "iterations or more. The last table compares systems that are called in the same way "
        "(with an array, as a TensorFlow op, through a strategy) over the same medium.",
        example="gradring bench all-reduce --world-size 2 --sizes 4KiB,1MiB --compare tensorflow",
    )
    own = sub.add_argument_group("measurement")
    add = partial(option, own)
    add("--world-size N", count("ranks"), default=2)("number of ranks (default 2)")
    add("--sizes SIZES", usage(options.parse_sizes), default=options.DEFAULT_SIZES)(
        "bytes on each rank; K, M, G or KiB, MiB, GiB are powers of 1024 (default %(default)s)"
    )
    transports = Names(options.TRANSPORTS, "transport {}")
    add("--transport TRANSPORTS", transports, default="auto", dest="transports")(
        f"of gradring, measured in turns: {', '.join(options.TRANSPORTS)} (default auto); tls "
        "is tcp inside TLS, with the certificates in GRADRING_TLS_CA, _CERT and _KEY"
    )
    add("--algorithm", choices=options.ALGORITHMS, default="auto")(
        "of gradring; auto takes the place of one that does not apply, such as hierarchical on one "
        "host (default auto)"
    )
    add("--checksum")("also measure gradring with checksums, in turns")
    add("--disturb")("run one more process that computes all the time")
    add("--dtype", choices=tuple(values.LARGEST_INTEGERS), default="float32")("of the elements")
    add("--op", choices=REDUCE_OPS, default="sum")("how they are reduced")
    add("--iterations K", count("iterations"))(
        "timed iterations of each system at each size (default: adapted to their time)"
    )
    peers = Names(systems.PEERS, "peer {} to compare with")
    add("--compare PEERS", peers, default=(), dest="peers")(
        f"also measure, in turns: {', '.join(systems.PEERS)}; over TCP, and gradring over TCP too"
    )
    add = partial(option, sub.add_argument_group("simulated hosts"))
    add("--hosts H", count("hosts"), default=1)(
        "put the ranks on H simulated hosts, equally many on each; with enough cores, each host "
        "has its own (needs root, iproute2)"
    )
    add("--rate RATE")(
        "of each simulated host's link in each direction, such as 1gbit (default: unlimited)"
    )
    _add_common(sub)
    option(sub, "--allow-debug")("measure a build that is not optimised")


def _add_link(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    sub = kinds.add_parser(
        "link",
        help="the raw TCP link between two ranks: bandwidth of both directions, round trip",
        description="Measures the rate at which two ranks of this machine send to each other at "
        "once through one TCP connection. This is the limit of an all-reduce between them.",
        example="gradring bench link",
    )
    _add_common(sub)


def _add_common(sub: argparse.ArgumentParser) -> None:
    sub.set_defaults(parser=sub)
    option(sub, "--congestion NAME")(
        "TCP congestion control of all measurements, such as reno (needs root, iproute2)"
    )
    option(sub, "--json FILE", Path)(
        "write the measurements to FILE too, with date, machine and congestion control"
    )


def _run_all_reduce(arguments: argparse.Namespace) -> int:
    from gradring.tools.bench.all_reduce import bench_all_reduce
    from gradring.tools.bench.options import Options

    options = Options(**{field.name: getattr(arguments, field.name) for field in fields(Options)})
    options.check(allow_debug=arguments.allow_debug)
    record = bench_all_reduce(options, say)
    if arguments.json is not None:
        record.write(arguments.json)
    return sum(measurement.wrong for measurement in record.measurements)


def _run_link(arguments: argparse.Namespace) -> int:
    from gradring.tools.bench.raw_link import bench_link

    measured = bench_link(say, arguments.congestion)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(measured, indent=1) + "\n")
    return sum(bandwidth["wrong"] for bandwidth in measured["bandwidths"])
