"""Predictions of `gradring simulate` beside measured times: `python -m benches.simulated_times`.

Ranks on simulated hosts (as root), whose links are limited so that these, and not the processors
that all hosts share here, take the time.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from benches.harness import Parser
from gradring._native import time_collective
from gradring.tools.bench.all_reduce import bench_all_reduce
from gradring.tools.bench.options import Options, format_size, parse_rate
from gradring.tools.bench.table import format_time
from gradring.tools.simulate.options import Network

#: Bytes of a frame of 1514 that are not headers.
PAYLOAD = 1448 / 1514
#: Between two network namespaces, with the processes that have to wake up.
LATENCY_S = 50e-6
#: Algorithm, ranks, and hosts with as many ranks on each.
CASES = (
    *(("ring", ranks, ranks) for ranks in (2, 4, 8)),
    *(("direct", ranks, ranks) for ranks in (2, 4, 8)),
    ("hierarchical", 4, 2),
    ("hierarchical", 8, 4),
)


def measured_us(
    case: tuple[str, int, int], sizes: Sequence[int], rate: str, iterations: int
) -> Iterator[float]:
    """The median time at each size."""
    algorithm, ranks, hosts = case
    options = Options(
        ranks,
        tuple(sizes),
        transports=("tcp",),
        algorithm=algorithm,
        iterations=iterations,
        hosts=hosts,
        rate=rate,
    )
    options.check()
    rows = bench_all_reduce(options, lambda _: None).measurements
    for row in rows:
        if row.system == "gradring":
            if row.algorithm != algorithm or row.wrong:
                raise SystemExit(f"{row} is not what was to be measured")
            yield row.median_us


def simulated_us(case: tuple[str, int, int], sizes: Sequence[int], rate: str) -> Iterator[float]:
    """The same in virtual time."""
    algorithm, ranks, hosts = case
    network = Network(
        world_size=ranks,
        ranks_per_host=ranks // hosts,
        latency_s=LATENCY_S,
        bytes_per_s=parse_rate(rate) * 1e9 * PAYLOAD,
    )
    for timing in time_collective(network, list(sizes), algorithm):
        yield timing["seconds"] * 1e6


def main() -> None:
    """Prints a row for each case and size."""
    parser = Parser(__doc__)
    parser.add_rate("1gbit")
    parser.add_sizes("1MiB,4MiB,16MiB")
    parser.add_argument("--iterations", type=int, default=7)
    arguments = parser.parse()
    sizes = arguments.sizes
    print("| algorithm | ranks, hosts | size | measured | simulated | ratio |")
    print("|---|---|---|---|---|---|")
    ratios = []
    for case in CASES:
        pairs = zip(
            measured_us(case, sizes, arguments.rate, arguments.iterations),
            simulated_us(case, sizes, arguments.rate),
            strict=True,
        )
        for size, (measured, simulated) in zip(sizes, pairs, strict=True):
            ratios.append(simulated / measured)
            print(
                f"| `{case[0]}` | {case[1]}, {case[2]} | {format_size(size)} | "
                f"{format_time(measured)} | {format_time(simulated)} | {ratios[-1]:.2f} |",
                flush=True,
            )
    print(f"median {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}")


if __name__ == "__main__":
    main()
