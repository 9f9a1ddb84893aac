"""Timeline of the records of all ranks, in Chrome's trace format (JSON).

Each rank of each group is a process of the trace. Its track ``collectives`` has a slice for each
collective, with two slices inside: waiting for the last peer, and moving bytes. Collectives of a
rank run one after the other, so these slices never overlap.

Above the track are asynchronous slices, which may overlap: ``queued`` until the collective's turn,
and ``awaited`` while the program waits for it. An arrow leads from the start of a late rank to the
point where a rank that waited for it continues.

On the track ``program``, ``compute`` is all time without a wait for a collective. Each partner of a
channel has a track for each direction.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gradring.records.records import Channel, Collective, Record

#: Limit below which a wait gets no arrow, because it is the time of the transfer.
ARROW_NS = 50_000

#: Tracks of a rank; the tracks of its channels follow.
COLLECTIVES, PROGRAM, CHANNELS = 0, 1, 2

Event = dict[str, Any]


def write(path: Path, *groups: Sequence[Record]) -> None:
    """Writes the timeline of one or several groups, each with at least one record.

    Raises:
        OSError: The file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(timeline(*groups), separators=(",", ":")))


def timeline(*groups: Sequence[Record]) -> dict[str, Any]:
    """Returns the timeline as a JSON object: times in microseconds since the first call."""
    calls = [call.launched_ns for group in groups for record in group for _, call in _calls(record)]
    start_ns = min(calls, default=0)
    names: list[Event] = []
    events: list[Event] = []
    named: dict[str, Record] = {}
    ranks = 0
    for number, records in enumerate(groups, start=1):
        suffix = "" if number == 1 else f" of group {number}"
        named |= {f"rank {record.rank}{suffix}": record for record in records}
        own_names = [event for record in records for event in _names(record, suffix)]
        own = [event for record in records for event in _events(record)]
        own += _arrows(records)
        for event in own:
            event["ts"] = (event["ts"] - start_ns) / 1000
            if "id" in event:
                event["id"] = f"{number}.{event['id']}"
        for event in own_names + own:
            event["pid"] += ranks
        ranks += records[0].world_size
        names += own_names
        events += own
    # Slices that begin together are nested, with the longer one outside.
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    clocks = {
        name: "not compared"
        if record.clock_within_ns is None
        else f"within {record.clock_within_ns / 1000:.0f} us of rank 0"
        for name, record in named.items()
    }
    forgotten = {name: record.forgotten for name, record in named.items() if record.forgotten}
    return {
        "traceEvents": names + events,
        "displayTimeUnit": "ms",
        "otherData": {"clocks": clocks, "forgotten collectives": forgotten},
    }


def _names(record: Record, suffix: str) -> Iterator[Event]:
    for kind, argument in (
        ("process_name", {"name": f"rank {record.rank} {record.host}{suffix}"}),
        ("process_sort_index", {"sort_index": record.rank}),
    ):
        yield {"ph": "M", "pid": record.rank, "tid": 0, "name": kind, "args": argument}
    channels = [f"{_direction(channel)} rank {channel.partner}" for channel in record.channels]
    for track, name in enumerate(["collectives", "program", *channels]):
        at = {"ph": "M", "pid": record.rank, "tid": track}
        yield {**at, "name": "thread_name", "args": {"name": name}}


def _events(record: Record) -> Iterator[Event]:
    for span_ns in _computing(record):
        yield _slice(record, "compute", span_ns, tid=PROGRAM, cat="program")
    for track, call in _calls(record):
        for event in _events_of(record, call):
            # Each track counts its own ordinals.
            known = {"id": f"{event['id']}.{track}"} if "id" in event else {}
            yield {**event, **known, "tid": track}


def _calls(record: Record) -> Iterator[tuple[int, Collective]]:
    """Yields each call of a rank with its track."""
    yield from ((COLLECTIVES, call) for call in record.collectives)
    for track, channel in enumerate(record.channels, CHANNELS):
        yield from ((track, call) for call in channel.calls)


def _direction(channel: Channel) -> str:
    return "send to" if any(call.call.startswith("send") for call in channel.calls) else "recv from"


def _events_of(record: Record, call: Collective) -> Iterator[Event]:
    started_ns = call.started_ns or record.written_ns
    # A blocking call starts at once.
    if started_ns > call.launched_ns:
        yield from _pair(record, call, "queued", (call.launched_ns, started_ns))
    if call.awaited_ns is not None:
        yield from _pair(record, call, "awaited", call.awaited_ns)
    if call.started_ns is None:
        return
    ended_ns = call.ended_ns or max(record.written_ns, call.started_ns)
    shown = ("sequence", "bytes", "algorithm", "state")
    details = {name: getattr(call, name) for name in shown}
    yield _slice(record, call.call, (call.started_ns, ended_ns), args=details)
    if call.entered_ns is not None:
        name = f"waiting for rank {call.last}"
        yield _slice(record, name, (call.started_ns, call.entered_ns))
        yield _slice(record, "moving", (call.entered_ns, ended_ns))


def _computing(record: Record) -> Iterator[tuple[int, int]]:
    """Yields the periods in which the program computed, between two waits for collectives."""
    still = [span for _, call in _calls(record) if (span := _standing_still(record, call))]
    gone_on_ns: int | None = None
    for begin_ns, end_ns in sorted(still):
        if gone_on_ns is not None and begin_ns > gone_on_ns:
            yield gone_on_ns, begin_ns
        # Threads of a program may wait at the same time.
        gone_on_ns = max(end_ns, gone_on_ns or end_ns)


def _standing_still(record: Record, call: Collective) -> tuple[int, int] | None:
    """Returns the period in which the program waited for a collective, as far as known."""
    if call.awaited_ns is not None or call.started_ns != call.launched_ns:
        return call.awaited_ns
    # The program's own thread performed a blocking call.
    return call.launched_ns, call.ended_ns or record.written_ns


def _slice(record: Record, name: str, span_ns: tuple[int, int], **more: Any) -> Event:
    lasted = {"dur": (span_ns[1] - span_ns[0]) / 1000}
    event = {"ph": "X", "name": name, "cat": "collective", **lasted, **more}
    return _at(record.rank, span_ns[0]) | event


def _pair(record: Record, call: Collective, kind: str, span_ns: tuple[int, int]) -> Iterator[Event]:
    event = {"name": f"{kind}: {call.call}", "cat": kind, "id": f"{record.rank}.{call.sequence}"}
    for phase, at_ns in zip("be", span_ns, strict=True):
        yield {**_at(record.rank, at_ns), "ph": phase, **event}


def _arrows(records: Sequence[Record]) -> Iterator[Event]:
    calls = [(record.rank, call) for record in records for call in record.collectives]
    starts = {(rank, call.sequence): call.started_ns for rank, call in calls}
    for rank, call in calls:
        if call.last is None or call.entered_ns is None or call.started_ns is None:
            continue
        cause_ns = starts.get((call.last, call.sequence))
        late = call.entered_ns - call.started_ns >= ARROW_NS
        if not late or cause_ns is None or cause_ns > call.entered_ns:
            continue
        arrow = {"name": "late", "cat": "late", "id": f"{call.sequence}.{rank}"}
        yield {**_at(call.last, cause_ns), **arrow, "ph": "s"}
        yield {**_at(rank, call.entered_ns), **arrow, "ph": "f", "bp": "e"}


def _at(rank: int, at_ns: int) -> Event:
    """Returns the fields of an event; its time is shifted to the start of the trace later."""
    return {"pid": rank, "tid": 0, "ts": at_ns}
