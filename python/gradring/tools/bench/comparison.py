"""Groups of comparable measurements: the same kind of call over the same medium.

A call from numpy and a strategy inside TensorFlow do different work around the same reduction, and
shared memory is not a network. So each system is compared with systems of its kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gradring.tools.bench.measurement import Measurement
from gradring.tools.bench.systems import link

#: Transports over the links that `link` measures.
TCP_TRANSPORTS = ("tcp", "tls", "grpc")
QUANTILES = ("p50", "p90", "p99")
ARRAY, OP, STRATEGY = "array", "TensorFlow op", "strategy"

#: Kind of call by the system's name; all other systems get an array of this process.
_CALLED = {
    "tensorflow-raw": OP,
    "gradring-op": OP,
    "tensorflow-strategy": STRATEGY,
    "gradring-strategy": STRATEGY,
}


@dataclass(frozen=True)
class Comparison:
    """Comparable measurements at one size.

    Attributes:
        bytes: Size of the buffer on each rank.
        kind: The common kind, such as ``array over TCP``.
        rows: One for each system; gradring's first.
    """

    bytes: int
    kind: str
    rows: tuple[Measurement, ...]

    @property
    def base(self) -> Measurement | None:
        """The measurement of gradring that is the base of ratios; None without one."""
        return self.rows[0] if _is_own(self.rows[0]) else None


def comparisons(measurements: Iterable[Measurement]) -> list[Comparison]:
    """Groups measurements by size and kind, in their order, without the raw links."""
    found: dict[tuple[int, str], list[Measurement]] = {}
    for row in measurements:
        if row.system not in (link.NAME, link.CACHED_NAME):
            found.setdefault((row.bytes, kind(row)), []).append(row)
    return [
        Comparison(size, name, tuple(sorted(rows, key=lambda row: not _is_own(row))))
        for (size, name), rows in found.items()
    ]


def kind(row: Measurement) -> str:
    """Returns kind of call and medium, such as ``array over TCP``."""
    medium = "over TCP" if row.transport in TCP_TRANSPORTS else f"over {row.transport}"
    if row.transport == "shm":
        medium = "through shared memory"
    return f"{called(row.system)} {medium}"


def called(system: str) -> str:
    """Returns the kind of call: with an array, as a TensorFlow op, or through a strategy."""
    return _CALLED.get(system, ARRAY)


def times_us(row: Measurement) -> tuple[float, float, float | None]:
    """Returns p50, p90 and p99 in microseconds."""
    return row.median_us, row.p90_us, row.p99_us


def times_as_long(row: Measurement, base: Measurement) -> tuple[float | None, ...]:
    """Returns the ratios of p50, p90 and p99 to those of ``base``; None where one has no p99."""
    return tuple(
        None if other is None or own is None else other / own
        for other, own in zip(times_us(row), times_us(base), strict=True)
    )


def label(row: Measurement, rows: Sequence[Measurement]) -> str:
    """Returns the system's name, with its transport if ``rows`` has several of them."""
    names = [other.system for other in rows]
    return f"{row.system} {row.transport}" if names.count(row.system) > 1 else row.system


def _is_own(row: Measurement) -> bool:
    return row.system.startswith("gradring")
