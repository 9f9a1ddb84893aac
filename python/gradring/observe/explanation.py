"""Sentences from the records of all ranks: missing ranks, waiting ranks and waiting times."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence

from gradring import _native
from gradring.config.words import agreed, listed, ranks
from gradring.records.records import Collective, Record, Statement


def explain(records: Sequence[Record]) -> list[str]:
    """Returns sentences on the ranks' activity; `records` has at least one, sorted by rank."""
    failed = any(record.failure for record in records)
    # A record from before the failure does not show its rank's position at the failure.
    current = [record for record in records if record.failure or not failed]
    return [
        *_failure(records),
        *_missing(records),
        *_position(current),
        *_kept_beside(current),
        *_clocks(current),
    ]


def _failure(records: Sequence[Record]) -> Iterator[str]:
    failed = [record for record in records if record.failure]
    if failed:
        yield f"The group failed: {failed[0].failure}"


def _missing(records: Sequence[Record]) -> Iterator[str]:
    present = {record.rank for record in records}
    missing = [rank for rank in range(records[0].world_size) if rank not in present]
    if missing:
        asked = all(record.reason == "SIGUSR2" for record in records)
        early = "ended well before the others"
        yield (
            f"{ranks(missing).capitalize()} left no record: killed, stopped, on another machine, "
            f"{f'{early}, or not asked' if asked else f'or {early}'}."
        )

    failed = any(record.failure for record in records)
    for record in records:
        if failed and not record.failure:
            yield (
                f"Rank {record.rank} left none when the group failed; its last one is of "
                f"{_clock_time(record.written_ns)} ({record.reason})."
            )


def _position(records: Sequence[Record]) -> Iterator[str]:
    found = _native.diagnose(records[0].world_size, [_statement(record) for record in records])
    if found is None:
        for record in records:
            if _beside(record) is None:
                yield f"{_name(record)} is in no collective; {_last_done(record)}."
        return
    sequence, calls = found["sequence"], found["calls"]
    there = {record.rank: record.find(sequence) for record in records}
    entered = {rank: call for rank, call in there.items() if call is not None}
    if len(calls) > 1:
        sides = "; ".join(f"{ranks(these)} called {call}" for call, these in calls)
        yield f"The ranks went different ways at #{sequence}: {sides}."
    waiting = [record for record in records if _is_under_way(there[record.rank])]
    where = f"#{sequence}" if len(calls) > 1 else f"{calls[0][0]} (#{sequence})"
    since = _since(entered, waiting) + _places(waiting, sequence)
    waiters = ranks([record.rank for record in waiting])
    verb = agreed(len(waiting), "has", "have")
    late = [record for record in records if record.rank in found["late"]]
    if late:
        names = listed(_name(record) for record in late)
        yield f"{names} never entered {where}; {waiters} {verb} waited{since}."
        for record in late:
            yield f"Before that, {_name(record)} had come this far: {_last_done(record)}."
    elif len(calls) == 1:
        yield f"{waiters.capitalize()} {verb} been in {where}{since}."
    done = [rank for rank, call in entered.items() if call.state == "done"]
    if done:
        yield f"{ranks(done).capitalize()} had already finished #{sequence}."


def _statement(record: Record) -> Statement:
    """Converts a record for `_native.diagnose`."""
    calls, beside = record.collectives, _beside(record)
    return (
        record.rank,
        [(call.sequence, call.call, call.step, call.state == "done") for call in calls],
        [beside[0]] if beside else [],
        0.0,
    )


def _beside(record: Record) -> tuple[int, Collective] | None:
    """Returns the ``send`` or ``recv`` that blocks the program, with its partner, if any."""
    for channel in record.channels:
        for call in channel.calls:
            # A call that was started in advance does not block the program until it is waited for.
            if call.state in ("running", "failed") and (call.place or call.awaited_ns):
                return channel.partner, call
    return None


def _kept_beside(records: Sequence[Record]) -> Iterator[str]:
    for record in records:
        beside = _beside(record)
        if beside is not None:
            _, call = beside
            since = _since({record.rank: call}, [record])
            place = f" ({call.place})" if call.place else ""
            yield f"{_name(record)} was in {call.call}{since}{place}."


def _since(entered: dict[int, Collective], latest: Sequence[Record]) -> str:
    since_ns = min(call.started_ns or call.launched_ns for call in entered.values())
    waited_s = (max(record.written_ns for record in latest) - since_ns) / 1e9
    return f" since {_clock_time(since_ns)}, for {waited_s:.1f} s"


def _places(waiting: Sequence[Record], sequence: int) -> str:
    """Returns the known source lines where programs wait for this collective or a later one."""
    places: dict[str, list[int]] = {}
    for record in waiting:
        calls = (call for call in record.collectives if call.sequence >= sequence)
        place = next((call.place for call in calls if call.place), None)
        if place:
            places.setdefault(place, []).append(record.rank)
    if list(places.values()) == [[record.rank for record in waiting]]:
        return f" ({next(iter(places))})"
    sides = "; ".join(f"{ranks(these)} at {place}" for place, these in places.items())
    return f" ({sides})" if sides else ""


def _clocks(records: Sequence[Record]) -> Iterator[str]:
    unknown = [record.rank for record in records if record.clock_within_ns is None]
    if unknown:
        clocks = agreed(len(unknown), "clock was", "clocks were")
        yield f"The {clocks} not compared with rank 0's on {ranks(unknown)}: times may be off."


def _is_under_way(call: Collective | None) -> bool:
    return call is not None and call.state in ("running", "failed", "queued")


def _last_done(record: Record) -> str:
    done = [call for call in record.collectives if call.state == "done" and call.ended_ns]
    if not done:
        return "it had finished no collective"
    last = done[-1]
    assert last.ended_ns is not None
    return f"it finished {last.call} (#{last.sequence}) at {_clock_time(last.ended_ns)}"


def _name(record: Record) -> str:
    return f"rank {record.rank} on {record.host}"


def _clock_time(at_ns: int) -> str:
    moment = datetime.datetime.fromtimestamp(at_ns / 1e9)
    return f"{moment:%H:%M:%S}.{moment.microsecond // 1000:03d}"
