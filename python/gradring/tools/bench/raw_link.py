"""``gradring bench link``: what the link between two ranks carries without any collective."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

import gradring
from gradring.machine import resources
from gradring.testing import run_ranks
from gradring.tools.bench.network import AS_THE_SYSTEM, network
from gradring.tools.bench.options import format_size
from gradring.tools.bench.systems.link import Exchange, open_ring
from gradring.tools.bench.table import format_time

#: Sent in each direction by one exchange.
VOLUME_BYTES = 64 << 20
#: What it repeats, so that it stays in cache.
BLOCKS_BYTES = (256 << 10, 1 << 20, 4 << 20)
EXCHANGES = 20
ROUND_TRIPS = 1000
WARM_UPS = 3
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Bandwidth:
    """Both directions at once, out of a block of one size and into another one.

    Attributes:
        block_bytes: What is sent repeats it. A block of some MiB stays in cache, one as large as
            the volume is read from memory and written to it, as the buffer of an all-reduce.
        volume_bytes: Sent in each direction by one exchange.
        exchanges: How many were timed.
        median_gbps: In each direction, in 1e9 bytes/s: the median,
        p90_gbps: what nine in ten exchanges reach,
        best_gbps: and the fastest.
        wrong: Bytes that were not as sent, of what each exchange received last.
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
    """What `bench_link` finds.

    Attributes:
        bandwidths: One for each size of blocks; the last is as large as the volume.
        round_trip_us: Time of 4 bytes there and back, blocking: the median,
        p90_round_trip_us: what nine in ten stay below,
        p99_round_trip_us: 99 in 100,
        best_round_trip_us: and the shortest.
        round_trips: How many were timed.
        congestion_control: Of the connection.
        date: When it was measured, to the minute, with the time zone.
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
    """Measures the link between two fresh processes of this machine: one TCP connection.

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
    say("# two ranks send to each other at once, through one TCP connection")
    for bandwidth in found.bandwidths:
        what = "a buffer" if bandwidth.block_bytes >= bandwidth.volume_bytes else "repeated blocks"
        say(
            f"{what} of {format_size(bandwidth.block_bytes)}: "
            f"{bandwidth.median_gbps:.2f} GB/s per direction ({bandwidth.p90_gbps:.2f} or more in "
            f"nine of ten, best {bandwidth.best_gbps:.2f}; "
            f"{bandwidth.exchanges} x {format_size(bandwidth.volume_bytes)}), "
            f"{bandwidth.wrong} wrong"
        )
    say(
        f"4 bytes there and back: {format_time(found.round_trip_us)} "
        f"(p90 {format_time(found.p90_round_trip_us)}, p99 {format_time(found.p99_round_trip_us)}, "
        f"best {format_time(found.best_round_trip_us)}; {found.round_trips} times)"
    )
    return found


def measure() -> LinkMeasurement:
    """What both ranks run."""
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
