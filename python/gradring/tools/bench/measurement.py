"""The measurement of one system at one size: times and bandwidths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Fewest iterations for a p99; of fewer, it would simply be the longest time.
P99_ITERATIONS = 100


@dataclass(frozen=True)
class Measurement:
    """A row of the table; its fields are the keys of the JSON.

    Attributes:
        system: ``gradring``, a peer's name, or ``link`` for the raw links with the traffic of a
            ring. ``gradring auto`` if it chose the transport and other transports are measured too.
        transport: The transport, such as ``tcp`` or ``shm``.
        algorithm: The algorithm, such as ``ring``; ``none`` for ``link``.
        world_size: Number of ranks.
        dtype: Element type by numpy's name.
        bytes: Size of the buffer on each rank.
        iterations: Number of timed iterations.
        median_us: Median time of an iteration in microseconds.
        min_us: Shortest time.
        p90_us: 90th percentile.
        p99_us: 99th percentile; None for fewer than 100 iterations.
        algbw_gbps: ``bytes`` over the median time, in 1e9 bytes/s.
        busbw_gbps: ``algbw_gbps`` times 2(N-1)/N, the bandwidth of each link in each direction.
        wrong: Number of unexpected elements, over all iterations and ranks.
        cpu_s_per_gb: Processor time of all ranks together per 1e9 bytes of the buffer; None in
            records before 2026-11-23.
    """

    system: str
    transport: str
    algorithm: str
    world_size: int
    dtype: str
    bytes: int
    iterations: int
    median_us: float
    min_us: float
    p90_us: float
    p99_us: float | None
    algbw_gbps: float
    busbw_gbps: float
    wrong: int
    cpu_s_per_gb: float | None = None

    @classmethod
    def of(
        cls,
        durations_s: Sequence[float],
        *,
        cpu_s: float,
        size_bytes: int,
        world_size: int,
        **facts: Any,
    ) -> Measurement:
        """Returns the summary of at least one iteration.

        Args:
            durations_s: Times of rank 0 in seconds.
            cpu_s: Processor time of all ranks in all iterations.
            size_bytes: Size of the buffer.
            world_size: Number of ranks.
            facts: Other attributes: system, transport, algorithm, dtype, wrong.
        """
        durations_us = np.array(durations_s) * 1e6
        median_us, p99_us = float(np.median(durations_us)), _quantile(durations_us, 0.99)
        algbw_gbps = size_bytes / median_us / 1e3
        return cls(
            **facts,
            world_size=world_size,
            bytes=size_bytes,
            iterations=len(durations_s),
            median_us=round(median_us, 3),
            min_us=round(float(durations_us.min()), 3),
            p90_us=_quantile(durations_us, 0.9),
            p99_us=p99_us if len(durations_s) >= P99_ITERATIONS else None,
            algbw_gbps=round(algbw_gbps, 9),
            busbw_gbps=round(algbw_gbps * 2 * (world_size - 1) / world_size, 9),
            cpu_s_per_gb=float(f"{cpu_s * 1e9 / (size_bytes * len(durations_s)):.3g}"),
        )


def _quantile(durations_us: NDArray[np.float64], part: float) -> float:
    return round(float(np.quantile(durations_us, part)), 3)
