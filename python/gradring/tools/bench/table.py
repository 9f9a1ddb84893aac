"""Measurements as text: aligned columns in the manner of nccl-tests, and ratios between systems."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

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

#: Columns as title, width, name of the fact and its format.
Columns = Sequence[tuple[str, int, str, str]]

_COLUMNS: Columns = (
    ("size", 8, "size", ""),
    ("count", 10, "count", ""),
    ("dtype", 9, "dtype", ""),
    ("op", 8, "op", ""),
    ("system", 22, "system", ""),
    ("transport", 9, "transport", ""),
    ("median us", 11, "median_us", ".1f"),
    ("min us", 11, "min_us", ".1f"),
    ("p90 us", 11, "p90_us", ".1f"),
    ("p99 us", 11, "p99_us", ".1f"),
    ("algbw GB/s", 11, "algbw_gbps", ".3f"),
    ("busbw GB/s", 11, "busbw_gbps", ".3f"),
    ("of link", 8, "of_link", ".0%"),
    ("cpu s/GB", 9, "cpu_s_per_gb", ".2g"),
    ("iterations", 11, "iterations", ""),
    ("wrong", 6, "wrong", ""),
)
_COMPARED: Columns = (
    ("size", 8, "size", ""),
    ("kind", 36, "kind", ""),
    ("system", 22, "system", ""),
    *((quantile, 7, f"{quantile}_time", "") for quantile in QUANTILES),
    *((f"x {quantile}", 7, f"{quantile}_ratio", "") for quantile in QUANTILES),
)


def header(columns: Columns = _COLUMNS) -> str:
    """Returns the line above the rows."""
    return " ".join(title.rjust(width) for title, width, *_ in columns)


def row(facts: Mapping[str, Any], columns: Columns) -> str:
    """Returns a line of a table; None is shown as ``-``."""
    cells = (
        ("-" if facts[name] is None else format(facts[name], form)).rjust(width)
        for _, width, name, form in columns
    )
    return " ".join(cells).rstrip()


def rows(measured: Sequence[Measurement], op: str) -> list[str]:
    """Returns one line for each system at one size.

    TCP systems have a ratio to the raw links' bandwidth at that size. Below 4 MiB the links are not
    measured, because latency matters there too.
    """
    limit_gbps = next((m.busbw_gbps for m in measured if m.system == link.NAME), None)
    return [row(_facts(m, op, limit_gbps), _COLUMNS) for m in measured]


def _facts(measured: Measurement, op: str, limit_gbps: float | None) -> dict[str, Any]:
    limit_gbps = limit_gbps if measured.transport in TCP_TRANSPORTS else None
    return asdict(measured) | {
        "size": format_size(measured.bytes),
        "count": measured.bytes // dtype_of(measured.dtype).itemsize,
        "op": op,
        "of_link": measured.busbw_gbps / limit_gbps if limit_gbps else None,
    }


def compared(measurements: Iterable[Measurement]) -> list[str]:
    """Returns the table of comparisons: p50, p90, p99, and their ratios to the first system."""
    lines = [
        "Like with like. x: how many times as long as gradring's first the others take",
        header(_COMPARED),
    ]
    for comparison in comparisons(measurements):
        lines += [row(_compared(comparison, each), _COMPARED) for each in comparison.rows]
    return lines


def format_time(microseconds: float) -> str:
    """Returns text such as ``41 ms`` or ``8.6 us``, with at least two digits."""
    value, unit = (microseconds, "us") if microseconds < 1000 else (microseconds / 1000, "ms")
    return f"{value:.1f} {unit}" if value < 10 else f"{value:.0f} {unit}"


def format_ratio(ratio: float) -> str:
    """Returns text such as ``120x``, ``1.2x`` or ``0.042x``, with at most three decimals."""
    digits = next((n for n, least in enumerate((9.95, 0.995, 0.0995)) if ratio >= least), 3)
    return f"{ratio:.{digits}f}x"


def _compared(comparison: Comparison, measured: Measurement) -> dict[str, str | None]:
    base = comparison.base
    alone = base is None or measured is base
    factors = (None,) * 3 if base is None or alone else times_as_long(measured, base)
    facts: dict[str, str | None] = {
        "size": format_size(comparison.bytes),
        "kind": comparison.kind,
        "system": label(measured, comparison.rows),
    }
    for quantile, us, factor in zip(QUANTILES, times_us(measured), factors, strict=True):
        facts[f"{quantile}_time"] = None if us is None else format_time(us)
        facts[f"{quantile}_ratio"] = "" if factor is None else format_ratio(factor)
    return facts
