"""Reports on gradients at parameter servers, for lines, logs and metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

#: Reasons why gradients are dropped, with the names of `_native.GradientCounts`.
DROPPED = {"late": "dropped_late", "overflow": "dropped_overflow", "lost": "dropped_lost"}

#: Counters of a worker that are added up over its optimizers.
_SUMS = (
    *("pushes", "dropped", "pulls", "unsettled"),
    *("bytes_sent", "bytes_received", "reconnects", "waited_s"),
)
#: Counters of the servers that are added up.
_SERVERS_SUMS = ("queue", "pushes", "updates", "held_overflow", "superfluous", *DROPPED.values())

#: Number of gradients by staleness in versions.
Staleness = Mapping[int, int]
#: Labels and value of a sample.
Sample = tuple[dict[str, str], float]


def mean_staleness(counted: Staleness) -> float | None:
    """Returns the mean staleness of gradients in versions; None without gradients."""
    total = sum(counted.values())
    return sum(each * count for each, count in counted.items()) / total if total else None


def of_all(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the numbers of several optimizers as those of one.

    Args:
        each: Counters of each optimizer's client; at least one.

    Returns:
        The counters of the first one, with the sums of all optimizers for numbers of pushes, pulls,
        bytes and gradients. ``optimizers`` has the counters of each.
    """
    first, servers = dict(each[0]), dict(each[0]["servers"])
    for name in _SUMS:
        first[name] = sum(one[name] for one in each)
    for name in _SERVERS_SUMS:
        servers[name] = sum(one["servers"][name] for one in each)
    staleness: Counter[int] = Counter()
    for one in each:
        staleness.update(one["servers"]["staleness"])
    servers["staleness"] = dict(sorted(staleness.items()))
    return {**first, "servers": servers, "optimizers": [dict(one) for one in each]}


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
