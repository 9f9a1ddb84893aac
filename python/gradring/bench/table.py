"""Measurements as text: aligned columns in the manner of nccl-tests, and ratios between systems."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gradring.bench.measurement import Measurement
from gradring.bench.plan import format_size
from gradring.bench.systems import link
from gradring.bench.values import dtype_of

TCP_TRANSPORTS = ("tcp", "tls", "grpc")
"""What goes through the links that `link` measures."""

_COLUMNS = (
    ("size", 8),
    ("count", 10),
    ("dtype", 9),
    ("op", 8),
    ("system", 22),
    ("transport", 9),
    ("median us", 11),
    ("min us", 11),
    ("p90 us", 11),
    ("algbw GB/s", 11),
    ("busbw GB/s", 11),
    ("of link", 8),
    ("iterations", 11),
    ("wrong", 6),
)


def header() -> str:
    """The line above the rows."""
    return _line([name for name, _ in _COLUMNS])


def rows(measured: Sequence[Measurement], op: str) -> list[str]:
    """One line for each system at one size.

    What goes through TCP is compared with what the raw links carried at that size; below 4 MiB,
    where time is latency too, there is no such measurement.
    """
    limit = next((m.busbw_gbps for m in measured if m.system == link.NAME), None)
    return [_row(m, op, limit) for m in measured]


def _row(measurement: Measurement, op: str, limit_gbps: float | None) -> str:
    m = measurement
    return _line(
        [
            format_size(m.bytes),
            str(m.bytes // dtype_of(m.dtype).itemsize),
            m.dtype,
            op,
            m.system,
            m.transport,
            f"{m.median_us:.1f}",
            f"{m.min_us:.1f}",
            f"{m.p90_us:.1f}",
            f"{m.algbw_gbps:.3f}",
            f"{m.busbw_gbps:.3f}",
            _share(m, limit_gbps),
            str(m.iterations),
            str(m.wrong),
        ]
    )


def ratios(measurements: Iterable[Measurement]) -> list[str]:
    """One line per size: the medians, and how many times the first system's the others' are.

    A system that occurs with several transports is followed by its transport.
    """
    by_size: dict[int, list[Measurement]] = {}
    for measurement in measurements:
        by_size.setdefault(measurement.bytes, []).append(measurement)
    return [f"{format_size(size)}: " + ", ".join(_compared(rows)) for size, rows in by_size.items()]


def format_time(microseconds: float) -> str:
    """``41 ms`` or ``8.6 us``: two digits, or all of those before the point."""
    value, unit = (microseconds, "us") if microseconds < 1000 else (microseconds / 1000, "ms")
    return f"{value:.1f} {unit}" if value < 10 else f"{value:.0f} {unit}"


def format_ratio(ratio: float) -> str:
    """``12.3x``, or ``0.042x``: at least two digits."""
    return f"{ratio:.1f}x" if ratio >= 1 else f"{ratio:.2g}x"


def _share(measurement: Measurement, limit_gbps: float | None) -> str:
    if limit_gbps is None or measurement.transport not in TCP_TRANSPORTS:
        return "-"
    return f"{measurement.busbw_gbps / limit_gbps:.0%}"


def _compared(rows: Sequence[Measurement]) -> list[str]:
    first, *others = rows
    names = [row.system for row in rows]

    def label(row: Measurement) -> str:
        return f"{row.system} {row.transport}" if names.count(row.system) > 1 else row.system

    return [
        f"{label(first)} {format_time(first.median_us)}",
        *(
            f"{label(other)} {format_time(other.median_us)} "
            f"({format_ratio(other.median_us / first.median_us)})"
            for other in others
        ),
    ]


def _line(texts: Sequence[str]) -> str:
    return " ".join(text.rjust(width) for text, (_, width) in zip(texts, _COLUMNS, strict=True))
