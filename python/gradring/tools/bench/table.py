"""Measurements as text: aligned columns in the manner of nccl-tests, and ratios between systems."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gradring.tools.bench.comparison import (
    QUANTILES,
    TCP_TRANSPORTS,
    Comparison,
    comparisons,
    label,
    times_as_long,
    times_us,
)
from gradring.tools.bench.measurement import Measurement
from gradring.tools.bench.options import format_size
from gradring.tools.bench.systems import link
from gradring.tools.bench.values import dtype_of

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
    ("p99 us", 11),
    ("algbw GB/s", 11),
    ("busbw GB/s", 11),
    ("of link", 8),
    ("cpu s/GB", 9),
    ("iterations", 11),
    ("wrong", 6),
)
_COMPARED = (
    ("size", 8),
    ("kind", 36),
    ("system", 22),
    *((quantile, 7) for quantile in QUANTILES),
    *((quantile, 7) for quantile in QUANTILES),
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
            "-" if m.p99_us is None else f"{m.p99_us:.1f}",
            f"{m.algbw_gbps:.3f}",
            f"{m.busbw_gbps:.3f}",
            _share(m, limit_gbps),
            "-" if m.cpu_s_per_gb is None else f"{m.cpu_s_per_gb:.2g}",
            str(m.iterations),
            str(m.wrong),
        ]
    )


def compared(measurements: Iterable[Measurement]) -> list[str]:
    """Like with like: p50, p90 and p99, and how many times the first system's they are."""
    lines = [
        "Like with like, and how many times as long as gradring's first the others take:",
        _line([name for name, _ in _COMPARED], _COMPARED),
    ]
    for comparison in comparisons(measurements):
        lines += [_compared(comparison, row) for row in comparison.rows]
    return lines


def format_time(microseconds: float) -> str:
    """``41 ms`` or ``8.6 us``: two digits, or all of those before the point."""
    value, unit = (microseconds, "us") if microseconds < 1000 else (microseconds / 1000, "ms")
    return f"{value:.1f} {unit}" if value < 10 else f"{value:.0f} {unit}"


def format_ratio(ratio: float) -> str:
    """``120x``, ``1.2x``, ``0.42x`` or ``0.042x``: at most three digits after the point."""
    digits = next((n for n, least in enumerate((9.95, 0.995, 0.0995)) if ratio >= least), 3)
    return f"{ratio:.{digits}f}x"


def _share(measurement: Measurement, limit_gbps: float | None) -> str:
    if limit_gbps is None or measurement.transport not in TCP_TRANSPORTS:
        return "-"
    return f"{measurement.busbw_gbps / limit_gbps:.0%}"


def _compared(comparison: Comparison, row: Measurement) -> str:
    base = comparison.base
    alone = base is None or row is base
    factors = (None,) * 3 if base is None or alone else times_as_long(row, base)
    return _line(
        [
            format_size(comparison.bytes),
            comparison.kind,
            label(row, comparison.rows),
            *("-" if us is None else format_time(us) for us in times_us(row)),
            *("" if factor is None else format_ratio(factor) for factor in factors),
        ],
        _COMPARED,
    )


def _line(texts: Sequence[str], columns: Sequence[tuple[str, int]] = _COLUMNS) -> str:
    aligned = (text.rjust(width) for text, (_, width) in zip(texts, columns, strict=True))
    return " ".join(aligned).rstrip()
