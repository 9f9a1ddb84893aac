"""Reports on gradients at parameter servers, for lines, logs and metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

#: Reasons why gradients are dropped, with the names of `_native.GradientCounts`.
DROPPED = {"late": "dropped_late", "overflow": "dropped_overflow", "lost": "dropped_lost"}

#: Number of gradients by staleness in versions.
Staleness = Mapping[int, int]
#: Labels and value of a sample.
Sample = tuple[dict[str, str], float]


def mean_staleness(counted: Staleness) -> float | None:
    """Returns the mean staleness of gradients in versions; None without gradients."""
    total = sum(counted.values())
    return sum(each * count for each, count in counted.items()) / total if total else None


def facts(updates: Mapping[str, Any]) -> dict[str, float | None] | None:
    """Returns a worker's numbers for a line; None under other update rules.

    Args:
        updates: The result of `CustomCollectiveStrategy.update_stats`.

    Returns:
        ``version`` is that of the worker's variables. ``staleness`` (the mean; None before the
        first gradient), ``staleness_max``, ``queue`` and ``dropped`` are of all workers' gradients,
        as reported by the first server.
    """
    if "servers" not in updates:
        return None
    servers = updates["servers"]
    staleness = servers["staleness"]
    return {
        "version": updates["version"],
        "staleness": mean_staleness(staleness),
        "staleness_max": max(staleness, default=None),
        "queue": servers["queue"],
        "dropped": sum(servers[name] for name in DROPPED.values()),
    }


def words(found: Mapping[str, float | None]) -> str:
    """Returns the result of `facts` as words for a line."""
    said = [f"version {found['version']}"]
    if found["staleness"] is not None:
        said.append(f"staleness {found['staleness']:.1f}, at most {found['staleness_max']}")
    said += [
        f"{found[name]} {what}" for name, what in (("queue", "queued"), ("dropped", "dropped"))
    ]
    return ", ".join(said)


def buckets(counted: Staleness) -> Iterator[tuple[str, Sample]]:
    """Yields a Prometheus histogram of staleness: suffixes of its name, with samples."""
    for bound in (0, 1, 2, 4, 8, 16, 32):
        below = sum(count for each, count in counted.items() if each <= bound)
        yield "_bucket", ({"le": str(bound)}, below)
    total = sum(counted.values())
    yield "_bucket", ({"le": "+Inf"}, total)
    yield "_sum", ({}, sum(each * count for each, count in counted.items()))
    yield "_count", ({}, total)
