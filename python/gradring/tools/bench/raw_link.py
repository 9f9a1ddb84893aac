"""``gradring bench link``: bandwidth and round trip of a link without any collective."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np

import gradring
from gradring.machine import resources
from gradring.testing import run_ranks
from gradring.tools.bench.network import AS_THE_SYSTEM, network
from gradring.tools.bench.options import format_size
from gradring.tools.bench.systems.link import Exchange, open_ring
from gradring.tools.bench.table import Columns, header, row

#: Bytes sent in each direction by one exchange.
VOLUME_BYTES = 64 << 20
#: Sizes of the repeated blocks, which stay in cache.
BLOCKS_BYTES = (256 << 10, 1 << 20, 4 << 20)
EXCHANGES = 20
ROUND_TRIPS = 1000
WARM_UPS = 3
TIMEOUT_S = 120.0

_BANDWIDTHS: Columns = (
    ("block", 8, "block", ""),
    ("volume", 8, "volume", ""),
    ("median GB/s", 11, "median_gbps", ".3f"),
    ("p90 GB/s", 11, "p90_gbps", ".3f"),
    ("best GB/s", 11, "best_gbps", ".3f"),
    ("exchanges", 10, "exchanges", ""),
    ("wrong", 6, "wrong", ""),
)
_ROUND_TRIPS: Columns = (
    ("size", 8, "size", ""),
    ("median us", 11, "round_trip_us", ".1f"),
    ("min us", 11, "best_round_trip_us", ".1f"),
    ("p90 us", 11, "p90_round_trip_us", ".1f"),
    ("p99 us", 11, "p99_round_trip_us", ".1f"),
    ("round trips", 11, "round_trips", ""),
)


@dataclass(frozen=True)
class Bandwidth:
    """The bandwidth of both directions at once, for one size of blocks.

    Attributes:
        block_bytes: Size of the block that is sent repeatedly, and of the block that receives.
            Blocks of some MiB stay in cache. A block as large as the volume is read from and
            written to memory, like the buffer of an all-reduce.
        volume_bytes: Bytes sent in each direction by one exchange.
        exchanges: Number of timed exchanges.
        median_gbps: Median bandwidth in each direction, in 1e9 bytes/s.
        p90_gbps: Bandwidth that nine in ten exchanges reach.
        best_gbps: Bandwidth of the fastest exchange.
        wrong: Number of wrong bytes in the last block of each exchange.
    """

    block_bytes: int
    volume_bytes: int
    exchanges: int
    median_gbps: float
    p90_gbps: float
    best_gbps: float
    wrong: int


@dataclass(frozen=True)
class LinkMeasurement:
    """The result of `bench_link`.

    Attributes:
        bandwidths: One for each size of blocks; the last is as large as the volume.
        round_trip_us: Median time of a round trip of 4 bytes with blocking calls, in microseconds.
        p90_round_trip_us: 90th percentile.
        p99_round_trip_us: 99th percentile.
        best_round_trip_us: Shortest time.
        round_trips: Number of timed round trips.
        congestion_control: TCP congestion control of the connection.
        date: Time of the measurement, to the minute, with the time zone.
        machine: Processor, cores and system.
    """

    bandwidths: list[Bandwidth]
    round_trip_us: float
    p90_round_trip_us: float
    p99_round_trip_us: float
    best_round_trip_us: float
    round_trips: int
    congestion_control: str
    date: str
    machine: str


def bench_link(say: Callable[[str], None], congestion: str | None = None) -> LinkMeasurement:
    """Measures one TCP connection between two new processes of this machine.

    Args:
        say: Called with each line of the report.
        congestion: The kernel's TCP congestion control; None leaves its default.

    Raises:
        RankFailure: A rank failed, or had not finished in time.
        ConfigError: The kernel refuses ``congestion``.
    """
    say(f"# {resources.date()}, {resources.machine()}, load {resources.load()} at the start")
    with network(congestion) as hosts:
        found: LinkMeasurement = run_ranks(
            measure,
            2,
            timeout=TIMEOUT_S,
            env=AS_THE_SYSTEM if congestion else None,
            hosts=hosts,
        )[0]
    say(f"# TCP congestion control {found.congestion_control}")
    say("# GB/s in each direction, at once over one TCP connection; the volume repeats a block")
    say(header(_BANDWIDTHS))
    for bandwidth in found.bandwidths:
        sizes = {
            "block": format_size(bandwidth.block_bytes),
            "volume": format_size(bandwidth.volume_bytes),
        }
        say(row(asdict(bandwidth) | sizes, _BANDWIDTHS))
    say("# there and back")
    say(header(_ROUND_TRIPS))
    say(row(asdict(found) | {"size": format_size(4)}, _ROUND_TRIPS))
    return found


def measure() -> LinkMeasurement:
    """Runs on both ranks: measures bandwidths and round trips."""
    with gradring.init() as comm, contextlib.ExitStack() as closing:
        link = open_ring(comm, closing)
        exchanges = {
            block: Exchange(link, comm.rank, comm.world_size, VOLUME_BYTES, block)
            for block in (*BLOCKS_BYTES, VOLUME_BYTES)
        }
        durations_s: dict[int, list[float]] = {block: [] for block in exchanges}
        wrong = dict.fromkeys(exchanges, 0)
        for number in range(WARM_UPS + EXCHANGES):
            for block, exchange in exchanges.items():
                samples = exchange.iterate(1, comm.barrier)
                wrong[block] += samples.wrong
                if number >= WARM_UPS:
                    durations_s[block] += samples.durations_s
        comm.barrier()
        trips_us = [
            link.round_trip(comm.rank, comm.world_size) * 1e6 for _ in range(WARM_UPS + ROUND_TRIPS)
        ][WARM_UPS:]
        median_us, p90_us, p99_us = np.quantile(trips_us, (0.5, 0.9, 0.99)).round(1).tolist()
        return LinkMeasurement(
            [_bandwidth(block, durations_s[block], wrong[block]) for block in wrong],
            median_us,
            p90_us,
            p99_us,
            round(min(trips_us), 1),
            len(trips_us),
            link.congestion_control(),
            resources.date(),
            resources.machine(),
        )


def _bandwidth(block: int, durations_s: list[float], wrong: int) -> Bandwidth:
    times_s = np.quantile(durations_s, (0.5, 0.9, 0.0))
    median, p90, best = (round(float(VOLUME_BYTES / time_s / 1e9), 3) for time_s in times_s)
    return Bandwidth(block, VOLUME_BYTES, len(durations_s), median, p90, best, wrong)
