"""Measurements that may be compared: those of what is called alike, over the same medium.

A call from numpy and a strategy inside TensorFlow do different things around the same reduction,
and shared memory is no network. So each system stands beside those that do as it does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gradring.tools.bench.measurement import Measurement
from gradring.tools.bench.systems import link

#: What goes through the links that `link` measures.
TCP_TRANSPORTS = ("tcp", "tls", "grpc")
QUANTILES = ("p50", "p90", "p99")
ARRAY, OP, STRATEGY = "array", "TensorFlow op", "strategy"

#: How a system is called, by its name; all others get an array of this process.
_CALLED = {
    "tensorflow-raw": OP,
    "gradring-op": OP,
    "tensorflow-strategy": STRATEGY,
    "gradring-strategy": STRATEGY,
}


@dataclass(frozen=True)
class Comparison:
    """Like with like at one size.

    Attributes:
        bytes: Size of the buffer on each rank.
        kind: What they have in common, such as ``array over TCP``.
        rows: One for each system; gradring's stand first.
    """

    bytes: int
    kind: str
    rows: tuple[Measurement, ...]

    @property
    def base(self) -> Measurement | None:
        """What the others are compared with: gradring's first; None without one."""
        return self.rows[0] if _is_own(self.rows[0]) else None


def comparisons(measurements: Iterable[Measurement]) -> list[Comparison]:
    """All of them, by size and kind in the order of the measurements; without the raw links."""
    found: dict[tuple[int, str], list[Measurement]] = {}
    for row in measurements:
        if row.system not in (link.NAME, link.CACHED_NAME):
            found.setdefault((row.bytes, kind(row)), []).append(row)
    return [
        Comparison(size, name, tuple(sorted(rows, key=lambda row: not _is_own(row))))
        for (size, name), rows in found.items()
    ]


def kind(row: Measurement) -> str:
    """``array over TCP``, ``strategy through shared memory``: how it is called, and the medium."""
    medium = "over TCP" if row.transport in TCP_TRANSPORTS else f"over {row.transport}"
    if row.transport == "shm":
        medium = "through shared memory"
    return f"{called(row.system)} {medium}"


def called(system: str) -> str:
    """How a system is called: with an array, as an op of TensorFlow, or through a strategy."""
    return _CALLED.get(system, ARRAY)


def times_us(row: Measurement) -> tuple[float, float, float | None]:
    """p50, p90 and p99."""
    return row.median_us, row.p90_us, row.p99_us


def times_as_long(row: Measurement, base: Measurement) -> tuple[float | None, ...]:
    """p50, p90 and p99 of ``row`` over those of ``base``; None where one has no p99."""
    return tuple(
        None if other is None or own is None else other / own
        for other, own in zip(times_us(row), times_us(base), strict=True)
    )


def label(row: Measurement, rows: Sequence[Measurement]) -> str:
    """The system, followed by its transport where it occurs with several among ``rows``."""
    names = [other.system for other in rows]
    return f"{row.system} {row.transport}" if names.count(row.system) > 1 else row.system


def _is_own(row: Measurement) -> bool:
    return row.system.startswith("gradring")
