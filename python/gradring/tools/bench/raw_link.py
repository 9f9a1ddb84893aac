"""``gradring bench link``: bandwidth and round trip of a link without any collective.

One exchange sends `VOLUME_BYTES` in each direction at once, as copies of one block. Blocks of some
MiB stay in cache. A block as large as the volume is read from and written to memory, like the
buffer of an all-reduce.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import gradring
from gradring.machine import resources
from gradring.testing import run_ranks
from gradring.tools.bench.network import AS_THE_SYSTEM, network
from gradring.tools.bench.options import format_size
from gradring.tools.bench.systems.link import Exchange, open_ring
from gradring.tools.bench.table import Columns, header, row

VOLUME_BYTES = 64 << 20
#: Sizes of the repeated blocks.
BLOCKS_BYTES = (256 << 10, 1 << 20, 4 << 20, VOLUME_BYTES)
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


def bench_link(say: Callable[[str], None], congestion: str | None = None) -> dict[str, Any]:
    """Measures one TCP connection between two new processes of this machine.

    Args:
        say: Called with each line of the report.
        congestion: The kernel's TCP congestion control; None leaves its default.

    Returns:
        The facts of the JSON. ``bandwidths`` has a row for each size of blocks, in 1e9 bytes/s in
        each direction. Round trips are those of 4 bytes with blocking calls.

    Raises:
        RankFailure: A rank failed, or had not finished in time.
        ConfigError: The kernel refuses ``congestion``.
    """
    date, machine = resources.date(), resources.machine()
    say(f"# {date}, {machine}, load {resources.load()} at the start")
    env = AS_THE_SYSTEM if congestion else None
    with network(congestion) as hosts:
        found: dict[str, Any] = run_ranks(measure, 2, timeout=TIMEOUT_S, env=env, hosts=hosts)[0]
    say(f"# TCP congestion control {found['congestion_control']}")
    say("# GB/s in each direction, at once over one TCP connection; the volume repeats a block")
    say(header(_BANDWIDTHS))
    for each in found["bandwidths"]:
        sizes = {name: format_size(each[f"{name}_bytes"]) for name in ("block", "volume")}
        say(row(each | sizes, _BANDWIDTHS))
    say("# there and back")
    say(header(_ROUND_TRIPS))
    say(row(found | {"size": format_size(4)}, _ROUND_TRIPS))
    return found | {"date": date, "machine": machine}


def measure() -> dict[str, Any]:
    """Runs on both ranks: measures bandwidths and round trips."""
    with gradring.init() as comm, contextlib.ExitStack() as closing:
        link = open_ring(comm, closing)
        place = comm.rank, comm.world_size
        exchanges = [Exchange(link, *place, VOLUME_BYTES, block) for block in BLOCKS_BYTES]
        # In turns, so that a change of the machine's speed affects all.
        samples = [
            [exchange.iterate(1, comm.barrier) for exchange in exchanges]
            for _ in range(WARM_UPS + EXCHANGES)
        ]
        comm.barrier()
        trips_us = [1e6 * link.round_trip(*place) for _ in range(WARM_UPS + ROUND_TRIPS)][WARM_UPS:]
        median_us, p90_us, p99_us, best_us = _quantiles(trips_us, 0.5, 0.9, 0.99, 0.0)
        bandwidths = []
        for block, of_block in zip(BLOCKS_BYTES, zip(*samples, strict=True), strict=True):
            durations_s = [second for each in of_block[WARM_UPS:] for second in each.durations_s]
            times_s = _quantiles(durations_s, 0.5, 0.9, 0.0)
            median, p90, best = (round(VOLUME_BYTES / time_s / 1e9, 3) for time_s in times_s)
            bandwidths.append(
                {
                    "block_bytes": block,
                    "volume_bytes": VOLUME_BYTES,
                    "exchanges": len(durations_s),
                    "median_gbps": median,
                    "p90_gbps": p90,
                    "best_gbps": best,
                    "wrong": sum(each.wrong for each in of_block),
                }
            )
        return {
            "bandwidths": bandwidths,
            "round_trip_us": round(median_us, 1),
            "p90_round_trip_us": round(p90_us, 1),
            "p99_round_trip_us": round(p99_us, 1),
            "best_round_trip_us": round(best_us, 1),
            "round_trips": len(trips_us),
            "congestion_control": link.congestion_control(),
        }


def _quantiles(times: Sequence[float], *parts: float) -> list[float]:
    found: list[float] = np.quantile(times, parts).tolist()
    return found
