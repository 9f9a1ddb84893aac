"""The check on every rank: joins the group as a training would, and measures every pair."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import statistics
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import gradring
from gradring.clusters import Cluster
from gradring.clusters.own_host import address_towards
from gradring.config.values import Settings
from gradring.group.collectives import all_gather_bytes
from gradring.group.communicator import Communicator
from gradring.tools.doctor import here
from gradring.tools.doctor.link_check import CONNECT_S, LinkMeasurement, initiate, respond

#: In larger groups the bandwidth is measured between neighbours of the ring only.
MOST_RANKS_FOR_ALL_BANDWIDTHS = 8
#: A link with less than this share of the median bandwidth is reported as slow.
SLOW_SHARE = 0.5
CLOCK_TOLERANCE_MS = 100.0

Say = Callable[[str], None]


def examine(cluster: Cluster, timeout_s: float, say: Say) -> bool:
    """Measures all pairs; rank 0 reports with ``say``. Returns True if there is no problem.

    Raises:
        GradringError: The group does not form; the message names the missing rank.
    """
    # The other ranks wait in a barrier while a pair fails to connect.
    stall_timeout_s = max(timeout_s, 3 * CONNECT_S)
    with gradring.init(timeout=timeout_s, stall_timeout=stall_timeout_s) as comm:
        facts = _gather(comm, _facts(comm, cluster))
        measured = _measure_links(comm, cluster, facts)
        collected: dict[str, LinkMeasurement] = {}
        for part in _gather(comm, {k: asdict(m) for k, m in measured.items()}):
            collected.update({key: LinkMeasurement(**values) for key, values in part.items()})
        if comm.rank == 0:
            for line in _rank_lines(facts) + link_lines(collected):
                say(line)
        problems = problems_of(facts, collected)
        if comm.rank == 0:
            for problem in problems:
                say(f"problem: {problem}")
            if not problems:
                say(f"all {comm.world_size} ranks reach each other")
        return not problems


def _facts(comm: Communicator, cluster: Cluster) -> dict[str, Any]:
    return {
        "host": comm.host,
        "interface": here.interface_towards(cluster.rendezvous),
        "source": cluster.source,
        "versions": here.versions(),
        "transport": comm.stats()["transport"],
    }


def _measure_links(
    comm: Communicator, cluster: Cluster, facts: list[dict[str, Any]]
) -> dict[str, LinkMeasurement]:
    """Measures one pair at a time, so that pairs do not share a link; the other ranks sleep."""
    host = cluster.rendezvous.rpartition(":")[0].strip("[]")
    own = address_towards(host)
    measured: dict[str, LinkMeasurement] = {}
    with listening(own, Settings.from_environ().port) as server:
        addresses = _gather(comm, [own, server.getsockname()[1]])
        for low, high in itertools.combinations(range(comm.world_size), 2):
            options = {
                "same_host": facts[low]["host"] == facts[high]["host"],
                "bandwidth": _neighbours(low, high, comm.world_size),
            }
            if comm.rank == low:
                address, port = addresses[high]
                measured[f"{low}-{high}"] = initiate((address, port), **options)
            elif comm.rank == high:
                respond(server, **options)
            comm.barrier()
    return measured


def listening(own: str, ports: tuple[int, int] | None) -> socket.socket:
    """Listens for the other ranks, at a free port of the configured range if possible."""
    family = socket.AF_INET6 if ":" in own else socket.AF_INET
    first, last = ports or (0, -1)
    for port in range(first, last + 1):
        with contextlib.suppress(OSError):
            return socket.create_server((own, port), family=family)
    return socket.create_server((own, 0), family=family)


def _neighbours(low: int, high: int, world_size: int) -> bool:
    return world_size <= MOST_RANKS_FOR_ALL_BANDWIDTHS or (high - low) in (1, world_size - 1)


def _gather(comm: Communicator, fact: Any) -> list[Any]:
    """Exchanges facts as JSON; returns the facts of all ranks, by rank."""
    return list(map(json.loads, all_gather_bytes(comm, json.dumps(fact).encode(), "doctor")))


def _rank_lines(facts: list[dict[str, Any]]) -> list[str]:
    lines = []
    for rank, fact in enumerate(facts):
        versions = ", ".join(f"{name} {text}" for name, text in fact["versions"].items())
        lines.append(
            f"rank {rank} on {fact['host']}, {fact['interface']}, {fact['transport']}, "
            f"found in {fact['source']}: {versions}"
        )
    return lines


def link_lines(measured: dict[str, LinkMeasurement]) -> list[str]:
    """Returns a table of all pairs, such as ``0-1``."""
    lines = [f"{'ranks':<10}{'round trip':>12}{'each way':>14}{'clocks apart':>16}"]
    for key, link in measured.items():
        if link.problem is not None:
            lines.append(f"{key:<10}{'unreachable':>12}  {link.problem}")
            continue
        gbps = "" if link.bandwidth_gbps is None else f"{link.bandwidth_gbps:.2f} GB/s"
        apart = _span(link.clock_offset_ms, digits=1)
        lines.append(f"{key:<10}{link.round_trip_us:>9.0f} us{gbps:>14}{apart:>16}")
    return lines


def problems_of(facts: list[dict[str, Any]], measured: dict[str, LinkMeasurement]) -> list[str]:
    """Returns a sentence for each problem.

    Args:
        facts: The facts of each rank, with its ``versions``.
        measured: Measurements by pair, such as ``0-1``.
    """
    problems = [
        f"ranks {key} cannot reach each other: {link.problem}"
        for key, link in measured.items()
        if link.problem is not None
    ]
    names = sorted({name for fact in facts for name in fact["versions"]})
    for name in names:
        found = [fact["versions"].get(name, "none") for fact in facts]
        if name != "kernel" and len(set(found)) > 1:
            listed = ", ".join(f"rank {rank} has {text}" for rank, text in enumerate(found))
            problems.append(f"versions of {name} differ: {listed}")
    bandwidths = [p.bandwidth_gbps for p in measured.values() if p.bandwidth_gbps]
    usual = statistics.median(bandwidths) if bandwidths else 0.0
    for key, link in measured.items():
        if link.bandwidth_gbps is not None and link.bandwidth_gbps < SLOW_SHARE * usual:
            problems.append(
                f"the link between ranks {key} is slow: {link.bandwidth_gbps:.2f} GB/s, where "
                f"{usual:.2f} GB/s is usual"
            )
        if abs(link.clock_offset_ms) > CLOCK_TOLERANCE_MS:
            is_far = abs(link.clock_offset_ms) >= 60_000
            certificates = ", and certificates may count as invalid" if is_far else ""
            problems.append(
                f"the clocks of ranks {key} are {_span(link.clock_offset_ms)} apart: logs and "
                f"traces will not line up{certificates}; run an NTP client"
            )
    return problems


def _span(milliseconds: float, digits: int = 0) -> str:
    """Returns a time in the unit in which it is easily read; `digits` of milliseconds."""
    seconds = milliseconds / 1e3
    if abs(seconds) < 10:
        return f"{round(milliseconds, digits) + 0.0:.{digits}f} ms"  # never -0.0
    return f"{seconds:,.0f} s" if abs(seconds) < 172_800 else f"{seconds / 86_400:,.0f} days"
