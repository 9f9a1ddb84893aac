"""Demands of Perfetto and chrome://tracing on a file in Chrome's trace format, as assertions.

Both skip what they do not accept without a word, so that a file can open and yet miss half of its
events. The rules are those of the format's description: every event has a name, a phase, a process,
a thread and a time; complete slices of a thread nest; asynchronous slices are begun once and ended
once, later; a flow starts inside a slice and ends inside one, later.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

Event = dict[str, Any]
#: Times are rounded to a thousandth of a microsecond on either end.
ROUNDING_US = 0.002
METADATA = {
    "process_name": "name",
    "process_sort_index": "sort_index",
    "thread_name": "name",
}


def accepted(path: Path) -> list[Event]:
    """The events of a file that both would show in full."""
    timeline = json.loads(path.read_text(), parse_constant=_refuse)
    assert timeline["displayTimeUnit"] in ("ms", "ns")
    events: list[Event] = timeline["traceEvents"]
    for event in events:
        _is_complete(event)
    timed = [event for event in events if event["ph"] != "M"]
    tracks: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in timed:
        tracks[event["pid"], event["tid"]].append(event)
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert set(tracks) <= named
    for track in tracks.values():
        times = [event["ts"] for event in track]
        assert times == sorted(times)
        _nest([event for event in track if event["ph"] == "X"])
    _pair([event for event in timed if event["ph"] in "be"], "b", "e")
    flows = _pair([event for event in timed if event["ph"] in "sf"], "s", "f")
    for flow in flows:
        for end in flow:
            slices = [e for e in tracks[end["pid"], end["tid"]] if e["ph"] == "X"]
            assert any(_contains(e, end["ts"]) for e in slices), f"no slice holds the end {end}"
    return events


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def _is_complete(event: Event) -> None:
    assert isinstance(event["name"], str) and event["name"]
    assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
    if event["ph"] == "M":
        assert METADATA[event["name"]] in event["args"]
        return
    assert event["ph"] in ("X", "b", "e", "s", "f"), event
    assert event["cat"]
    assert math.isfinite(event["ts"]) and event["ts"] >= 0
    if event["ph"] == "X":
        assert math.isfinite(event["dur"]) and event["dur"] >= 0
    else:
        assert isinstance(event["id"], str) and event["id"]
    if event["ph"] == "f":
        # Without it, the arrow would lead to the next slice that begins.
        assert event["bp"] == "e"


def _nest(slices: list[Event]) -> None:
    """In the order of the file, a slice lies wholly inside or wholly after those before it."""
    around: list[Event] = []
    for event in slices:
        while around and around[-1]["ts"] + around[-1]["dur"] <= event["ts"] + ROUNDING_US:
            around.pop()
        for outer in around:
            end = event["ts"] + event["dur"]
            assert end <= outer["ts"] + outer["dur"] + ROUNDING_US, (outer, event)
        around.append(event)


def _pair(events: list[Event], first: str, second: str) -> list[tuple[Event, Event]]:
    """By category and id, each first with its second, which is not earlier."""
    found: dict[tuple[str, str], dict[str, Event]] = defaultdict(dict)
    for event in events:
        phases = found[event["cat"], event["id"]]
        assert event["ph"] not in phases, f"twice: {event}"
        phases[event["ph"]] = event
    for phases in found.values():
        assert set(phases) == {first, second}, phases
        assert phases[first]["ts"] <= phases[second]["ts"]
        assert phases[first]["name"] == phases[second]["name"]
    return [(phases[first], phases[second]) for phases in found.values()]


def _contains(event: Event, time_us: float) -> bool:
    ends_us = event["ts"] + event["dur"]
    return bool(event["ts"] - ROUNDING_US <= time_us <= ends_us + ROUNDING_US)
