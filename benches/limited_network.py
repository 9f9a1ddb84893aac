"""All-reduce between hosts whose links are limited: `python -m benches.limited_network`, as root.

Simulated hosts, with one rank or several on each, joined by links of `--rate` in each direction.
Over loopback, all of communication is computing; here most of it is waiting for the line, as
between machines, and the share of the line rate is what counts. Headers of TCP, IP and Ethernet
take about 4 % of the line.

Each size is measured with each algorithm, with float32 on the wire and with bfloat16, which halves
the bytes; `busbw` is of the float32 bytes of a ring in both cases, so that fewer bytes show as more
than the line rate. `crossed` is what left the first host for each byte of the buffer, with headers.

`--flow-rate` limits each TCP connection, as clouds do; `--streams 1,2,4` then shows what several
connections to each peer gain: `python -m benches.limited_network --rate 2gbit --flow-rate 500mbit
--streams 1,2,4`.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

import gradring
from benches.harness import TIMEOUT_S, Parser, print_surroundings, write
from gradring.config.values import WireDtype
from gradring.errors import ConfigError
from gradring.testing import run_ranks, simulated_hosts
from gradring.tools.bench import values
from gradring.tools.bench.options import format_size, parse_rate
from gradring.tools.bench.systems.system import InPlace

WIRE_DTYPES: tuple[WireDtype | None, ...] = (None, "bfloat16")
WARM_UPS = 2
#: Relative, of what bfloat16 has rounded twice; float32 must be exact.
TOLERANCE = 2.0**-7


@dataclass(frozen=True)
class Row:
    """One size with one algorithm and dtype on the wire; `refused` says why it was not measured."""

    algorithm: str
    streams: int
    wire_dtype: str
    bytes: int
    median_ms: float = 0.0
    busbw_gbps: float = 0.0
    share_of_line: float = 0.0
    crossed: float = 0.0
    iterations: int = 0
    wrong: int = 0
    refused: str = ""


def rank_main(
    algorithms: Sequence[str],
    streams: tuple[int, ...],
    sizes: tuple[int, ...],
    iterations: int,
    line_gbps: float,
) -> list[Row]:
    """Measures everything; only rank 0's rows count."""
    rows = []
    for algorithm, count, wire_dtype in itertools.product(algorithms, streams, WIRE_DTYPES):
        name = wire_dtype or "float32"
        try:
            comm = gradring.init(algorithm=algorithm, wire_dtype=wire_dtype, streams=count)
        except ConfigError as error:
            rows += [Row(algorithm, count, name, size, refused=str(error)) for size in sizes]
            continue
        with comm:
            rows += [_measure(comm, name, size, iterations, line_gbps) for size in sizes]
            comm.barrier()
    return rows


def _measure(
    comm: gradring.Communicator, wire_dtype: str, size: int, iterations: int, line_gbps: float
) -> Row:
    problem = values.Problem(comm.rank, comm.world_size, size // 4, "sum", "float32")
    kind = InPlace if wire_dtype == "float32" else _Rounded
    reduction = kind(problem, lambda buffer: partial(comm.all_reduce, buffer, problem.op))
    durations_s, crossed, wrong = [], 0, 0
    for _ in range(WARM_UPS + iterations):
        # Before the barrier: behind it, other ranks of this host may begin earlier than this one.
        sent_before = _sent_bytes()
        samples = reduction.iterate(1, comm.barrier)
        algorithm = comm.stats()["algorithm"]
        # Until every rank has all, this host may still have to send.
        comm.barrier()
        crossed += _sent_bytes() - sent_before
        durations_s += samples.durations_s
        wrong += samples.wrong
    wrong = comm.all_reduce(wrong)
    median_s = statistics.median(durations_s[WARM_UPS:])
    busbw_gbps = problem.link_bytes / median_s / 1e9
    return Row(
        algorithm,
        comm.stats()["streams"],
        wire_dtype,
        size,
        round(median_s * 1e3, 3),
        round(busbw_gbps, 6),
        round(busbw_gbps / line_gbps, 4),
        round(crossed / (WARM_UPS + iterations) / size, 4),
        iterations,
        wrong,
    )


def _sent_bytes() -> int:
    """What has left this host."""
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


class _Rounded(InPlace):
    def count_wrong(self) -> int:
        right = np.isclose(self.result(), self.expected, rtol=TOLERANCE, atol=0.0)
        return int(np.count_nonzero(~right))


def parse_streams(text: str) -> tuple[int, ...]:
    """Reads `1,2,4`."""
    return tuple(int(word) for word in text.split(","))


def main(arguments: list[str] | None = None) -> None:
    """Measures and prints."""
    parser = Parser(__doc__)
    parser.add_rate("1gbit")
    parser.add_argument("--flow-rate", help="of each TCP connection; default: no such limit")
    parser.add_argument("--streams", type=parse_streams, default="1", help="such as 1,2,4")
    parser.add_sizes("16MiB,100MiB")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=1, metavar="L")
    parser.add_argument(
        "--algorithms", default="auto", help="such as auto or ring,direct,hierarchical"
    )
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_record()
    options = parser.parse(arguments)
    line_gbps = parse_rate(options.rate)
    with simulated_hosts(options.hosts, options.rate, options.flow_rate) as hosts:
        placed = [host for host in hosts for _ in range(options.ranks_per_host)]
        rows: list[Row] = run_ranks(
            rank_main,
            len(placed),
            options.algorithms.split(","),
            options.streams,
            options.sizes,
            options.iterations,
            line_gbps,
            hosts=placed,
            timeout=TIMEOUT_S,
        )[0]
    print(
        f"# {options.hosts} simulated hosts of {options.ranks_per_host} ranks, links of "
        f"{options.rate} = {line_gbps:g} GB/s"
    )
    if options.flow_rate:
        flow_gbps = parse_rate(options.flow_rate)
        print(f"# connections of {options.flow_rate} = {flow_gbps:g} GB/s at most")
    print_surroundings()
    names = (
        f"{'on the wire':>12} {'median ms':>10} {'busbw GB/s':>11} {'of line':>8} {'crossed':>8}"
    )
    print(f"{'size':>8} {'algorithm':>13} {'streams':>7} {names}  wrong")
    for row in rows:
        how = f"{row.algorithm:>13} {row.streams:7} {row.wire_dtype:>12}"
        start = f"{format_size(row.bytes):>8} {how}"
        if row.refused:
            print(f"{start} not supported: {row.refused}")
            continue
        share = f"{row.share_of_line:.0%}"
        numbers = f"{row.median_ms:10.1f} {row.busbw_gbps:11.4f} {share:>8} {row.crossed:8.2f}"
        print(f"{start} {numbers} {row.wrong:6}")
    write(options.json, rows)
    if any(row.wrong for row in rows):
        raise SystemExit("results were wrong; see the last column")


if __name__ == "__main__":
    main()
