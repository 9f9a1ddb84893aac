"""Reports of what parameter servers have made of gradients: in lines, logs and metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

#: What becomes of gradients that are in no update, by how `_native.GradientCounts` has it.
DROPPED = {"late": "dropped_late", "overflow": "dropped_overflow", "lost": "dropped_lost"}

#: By staleness, how many gradients.
Staleness = Mapping[int, int]
#: Labels and value.
Sample = tuple[dict[str, str], float]


def mean_staleness(counted: Staleness) -> float | None:
    """By how many versions gradients were late on average; None without any."""
    total = sum(counted.values())
    return sum(each * count for each, count in counted.items()) / total if total else None


def facts(updates: Mapping[str, Any]) -> dict[str, float | None] | None:
    """The numbers of a worker that change from line to line; None under other update rules.

    Args:
        updates: What `CustomCollectiveStrategy.update_stats` returns.

    Returns:
        ``version`` of the variables that the worker has, and of all workers' gradients, as the
        first server has told it, ``staleness`` (their mean; None before the first),
        ``staleness_max``, ``queue`` and ``dropped``.
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
    """What `facts` has found, for a line."""
    said = [f"version {found['version']}"]
    if found["staleness"] is not None:
        said.append(f"staleness {found['staleness']:.1f}, at most {found['staleness_max']}")
    said += [
        f"{found[name]} {what}" for name, what in (("queue", "queued"), ("dropped", "dropped"))
    ]
    return ", ".join(said)


def buckets(counted: Staleness) -> Iterator[tuple[str, Sample]]:
    """Staleness as a histogram of Prometheus: suffixes of its name, and samples."""
    for bound in (0, 1, 2, 4, 8, 16, 32):
        below = sum(count for each, count in counted.items() if each <= bound)
        yield "_bucket", ({"le": str(bound)}, below)
    total = sum(counted.values())
    yield "_bucket", ({"le": "+Inf"}, total)
    yield "_sum", ({}, sum(each * count for each, count in counted.items()))
    yield "_count", ({}, total)
