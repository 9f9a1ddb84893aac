"""A timeline holds all ranks, in order, balanced, and slices that nest."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chrome_trace import ROUNDING_US, accepted

import gradring
from gradring import errors
from gradring.records.records import Collective, Record
from gradring.records.timeline import write
from gradring.testing import run_ranks
from gradring.tools import cli
from support.commands import succeeded
from support.pairs import on_threads
from support.waiting import wait_until

PROGRAM = """
import time, numpy as np, gradring
with gradring.init() as comm:
    x = np.ones(1000, np.float32)
    comm.barrier()
    for step in range(10):
        time.sleep(0.02 if comm.rank == 1 else 0)
        works = [comm.all_reduce_async(x, name=f"w{n}") for n in range(1)]
        [work.wait() for work in works]
    comm.barrier()
"""


def check(path: Path, world_size: int) -> list[dict[str, Any]]:
    """What must be true of every timeline; returns its events."""
    timeline = json.loads(path.read_text())
    named = [e for e in timeline["traceEvents"] if e["ph"] == "M" and e["name"] == "process_name"]
    assert [e["args"]["name"].split()[1] for e in named] == [str(r) for r in range(world_size)]
    events = [event for event in accepted(path) if event["ph"] != "M"]
    assert {event["pid"] for event in events} == set(range(world_size))
    assert events[0]["ts"] == 0
    for rank in range(world_size):
        outer = [e for e in events if e["ph"] == "X" and e["pid"] == rank and "args" in e]
        sequences = [e["args"]["sequence"] for e in outer]
        assert sequences == sorted(sequences)
        for one, following in itertools.pairwise(outer):
            assert one["ts"] + one["dur"] <= following["ts"] + ROUNDING_US
    return events


def test_the_launcher_writes_one_timeline_of_all_ranks(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    trace = tmp_path / "timeline.json"
    launch = ["run", "-np", 2, "--trace", trace, "--", sys.executable, program]
    done = succeeded(*launch, timeout=120)
    assert f"the timeline is {trace}; open it" in done.stderr
    assert not trace.with_name("timeline.json.parts").exists()
    events = check(trace, 2)
    called = [e for e in events if e["ph"] == "X" and "args" in e]
    assert Counter(e["pid"] for e in called) == {0: 12, 1: 12}
    assert {e["name"] for e in called} == {"all_reduce(sum) 'w0' float32[1000]", "barrier"}
    assert {e["args"]["bytes"] for e in called} == {4000, 1}
    waits = [e for e in events if e["name"] == "waiting for rank 1"]
    assert sum(e["dur"] for e in waits) > 100_000
    assert {e["cat"] for e in events if e["ph"] == "b"} == {"queued", "awaited"}
    # Its pauses lie between two barriers.
    computes = [e["dur"] for e in events if e["name"] == "compute" and e["pid"] == 1]
    assert sum(computes) > 10 * 20_000
    # An arrow leads from the late rank to the one that waited for it.
    assert {e["pid"] for e in events if e["ph"] == "f"} >= {0}


def test_a_program_computes_between_the_times_in_which_it_stands_still(tmp_path: Path) -> None:
    def call(
        sequence: int, launched: int, started: int, ended: int, awaited: tuple[int, int] | None
    ) -> Collective:
        known = (sequence, "a", 4, "ring", "done", None)
        return Collective(*known, launched, started, None, ended, awaited)

    calls = (
        call(1, 1_000, 1_000, 3_000, None),
        # Nobody waited for the second, and two threads at once for the others.
        call(2, 3_500, 3_600, 4_000, None),
        call(3, 4_100, 4_200, 9_500, (5_000, 9_500)),
        call(4, 4_300, 9_500, 9_600, (7_000, 8_000)),
        call(5, 9_500, 9_500, 10_000, None),
        call(6, 20_000, 20_000, 21_000, None),
        call(7, 22_000, 22_500, 23_000, None),
    )
    record = Record(0, 1, "host", "trace", 30_000, 0, None, None, 0, calls)
    write(tmp_path / "timeline.json", [record])
    computes = [e for e in accepted(tmp_path / "timeline.json") if e["name"] == "compute"]
    assert [(e["ts"], e["dur"]) for e in computes] == [(2.0, 2.0), (9.0, 10.0)]
    assert {(e["tid"], e["cat"]) for e in computes} == {(1, "program")}


def test_what_viewers_would_drop_is_found(tmp_path: Path) -> None:
    at = {"pid": 0, "tid": 0, "cat": "c"}
    thread = {"ph": "M", "pid": 0, "tid": 0, "name": "thread_name", "args": {"name": "t"}}
    outer = {**at, "ph": "X", "name": "outer", "ts": 0, "dur": 10}
    start = {**at, "ph": "s", "name": "late", "id": "1", "ts": 1}
    finish = {**at, "ph": "f", "name": "late", "id": "1", "ts": 2, "bp": "e"}
    begin = {**at, "ph": "b", "name": "queued", "id": "1", "ts": 1}

    def opens(*events: dict[str, Any]) -> bool:
        path = tmp_path / "timeline.json"
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
        try:
            accepted(path)
        except (AssertionError, KeyError):
            return False
        return True

    assert opens(thread, outer, start, finish)
    assert not opens(outer)
    assert not opens(thread, outer, start)
    assert not opens(thread, outer, start, {**finish, "ts": 11})
    assert not opens(thread, outer, begin)
    assert not opens(thread, outer, {**outer, "name": "across", "ts": 5})
    assert not opens(thread, {**outer, "ts": 5}, outer)
    assert not opens(thread, {**outer, "dur": float("nan")})


def switch(path: str) -> tuple[str, Path | None]:
    with gradring.init() as comm:
        x = np.ones(10, np.float32)
        comm.all_reduce(x, name="before")
        comm.trace_start(path, limit=20)
        for _ in range(30):
            comm.all_reduce(x, name="during")
        written = comm.trace_stop()
        comm.all_reduce(x, name="after")
        return str(written), comm.trace_stop()


def test_a_timeline_that_cannot_be_written_is_one_error_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    def trace(comm: gradring.Communicator) -> str:
        comm.trace_start(tmp_path / "file" / "timeline.json")
        with pytest.raises(errors.SaveError) as raised:
            comm.trace_stop()
        return str(raised.value)

    for text in on_threads(2, trace):
        assert re.match(r"rank 0 on \S+ could not write \S+timeline\.json: \w+Error", text)


def test_tracing_is_switched_on_and_off_and_keeps_the_last(tmp_path: Path) -> None:
    path = tmp_path / "new" / "timeline.json"
    assert run_ranks(switch, 3, str(path)) == [
        (str(path), None),
        ("None", None),
        ("None", None),
    ]
    called = [e for e in check(path, 3) if e["ph"] == "X" and "args" in e]
    assert Counter(e["pid"] for e in called) == {0: 20, 1: 20, 2: 20}
    assert {e["name"] for e in called} == {"all_reduce(sum) 'during' float32[10]"}
    forgotten = json.loads(path.read_text())["otherData"]["forgotten collectives"]
    assert sorted(forgotten) == ["rank 0", "rank 1", "rank 2"]


def test_parts_of_ranks_without_a_launcher_are_merged_by_hand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "timeline.json"
    run_ranks(reduce_some, 2, env={"GRADRING_TRACE": str(trace)})
    assert cli.main(["explain", f"{trace}.parts", "--trace", str(trace)]) == 0
    said = capsys.readouterr().out
    assert "is in no collective; it finished all_reduce(sum) float32[10] (#5)" in said
    check(trace, 2)
    assert cli.main(["explain", f"{trace}.parts", "--trace", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"gradring explain: {tmp_path}: Is a directory\n"


def reduce_some() -> None:
    with gradring.init() as comm:
        for _ in range(5):
            comm.all_reduce(np.ones(10, np.float32))


def test_each_group_of_a_process_is_in_the_timeline(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import numpy as np, gradring\n"
        "from gradring.machine.ports import free_ports\n"
        "with gradring.init() as comm:\n"
        "    address = comm.broadcast_object(f'127.0.0.1:{free_ports(1)[0]}')\n"
        "    place = {'rank': comm.rank, 'world_size': 2, 'rendezvous': address}\n"
        "    with gradring.init(**place) as other:\n"
        "        other.all_reduce(np.ones(3), name='other')\n"
        "    comm.all_reduce(np.ones(3), name='first')\n"
        "with gradring.init() as again:\n"
        "    again.all_reduce(np.ones(3), name='again')\n"
    )
    trace = tmp_path / "timeline.json"
    assert cli.main(["run", "-np", "2", "--trace", str(trace), str(program)]) == 0
    events = accepted(trace)
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    groups = [(named[pid].split()[1], named[pid].partition(" of ")[2]) for pid in sorted(named)]
    assert groups == [(rank, of) for of in ("", "group 2", "group 3") for rank in "01"]
    called = {
        (event["pid"], name)
        for event in events
        for name in ("first", "other", "again")
        if "args" in event and f"'{name}'" in event["name"]
    }
    places = {"first": (0, 1), "other": (2, 3), "again": (4, 5)}
    assert called == {(pid, name) for name, pids in places.items() for pid in pids}


def clock_of(comm: gradring.Communicator) -> dict[str, int] | None:
    comm.trace_start("unused")
    clock: dict[str, int] | None = json.loads(comm._native.take_trace() or b"{}")["clock"]
    return clock


def clocks() -> int:
    with gradring.init() as comm:
        wait_until(lambda: clock_of(comm) is not None, "clocks were compared")
        clock = clock_of(comm)
        comm.barrier()
        assert clock is not None
        return clock["ns"]


def test_clocks_of_one_host_are_found_equal() -> None:
    assert run_ranks(clocks, 3) == [0, 0, 0]


def test_a_timeline_that_cannot_be_written_ends_no_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("GRADRING_TRACE", str(tmp_path / "file" / "timeline.json"))
    gradring.init().close()
    assert "cannot be written" in caplog.text


def test_a_recording_that_the_program_has_ended_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GRADRING_TRACE", str(tmp_path / "timeline.json"))
    with gradring.init() as comm:
        comm.trace_start(tmp_path / "part.json")
        comm.trace_stop()
    assert "leaves no part of" in caplog.text and "trace_stop() has ended" in caplog.text


def test_a_limit_that_makes_no_sense_is_refused() -> None:
    with gradring.init() as comm, pytest.raises(errors.ConfigError, match="limit=0"):
        comm.trace_start("x", limit=0)
