"""Flight records of ranks that fail or are asked, and the sentences made of them."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradring
from faults.actor import belongings
from faults.test_faults import reduce_until_killed
from gradring.errors import AbortedError
from gradring.observe import observer
from gradring.observe.explanation import explain
from gradring.records.paths import part_of
from gradring.records.records import FORMAT, Channel, Collective, Record, parse, read
from gradring.testing import run_ranks
from gradring.tools import cli
from support.waiting import meet, wait_until

# What ranks on a busy machine need at most to find each other, once they have started.
STALL_S = 3.0

W = "all_reduce(sum) 'w' float32[10]"


def start_together() -> None:
    """Waits until all ranks have started: some are long in importing."""
    started = Path(os.environ["GRADRING_FLIGHT_DIR"]).with_name("started")
    meet(started, int(os.environ["GRADRING_WORLD_SIZE"]))


def until_records_are_left(count: int) -> None:
    """This rank leaves one, too, when it has heard of the end."""
    flight = Path(os.environ["GRADRING_FLIGHT_DIR"])
    wait_until(lambda: len([*flight.glob("rank-*.json")]) == count, "records are left")


def stay_away(absent: int) -> None:
    start_together()
    with gradring.init(stall_timeout=STALL_S) as comm:
        x = np.ones(10, np.float32)
        for _ in range(4):
            comm.all_reduce(x, name="w")
        if comm.rank != absent:
            comm.all_reduce(x, name="w")
        else:
            until_records_are_left(3)


PLACE = rf"(\S*/)?test_flight_records\.py:{stay_away.__code__.co_firstlineno + 7}"


def test_the_rank_that_did_not_come_is_named(tmp_path: Path) -> None:
    directory = tmp_path / "flight"
    run_ranks(stay_away, 3, 1, env={"GRADRING_FLIGHT_DIR": str(directory)}, check=False)
    records = read(directory)
    assert [record.rank for record in records] == [0, 1, 2]
    assert {record.reason for record in records} == {"error"}
    assert {record.blamed for record in records} == {1}
    host = records[0].host
    failed, sentence, before = explain(records)
    assert failed.startswith("The group failed: ")
    assert re.fullmatch(
        rf"rank 1 on {host} never entered {re.escape(W)} \(#5\); ranks 0 and 2 have waited "
        rf"since \d\d:\d\d:\d\d\.\d\d\d, for \d+\.\d s \({PLACE}\)\.",
        sentence,
    )
    assert before.startswith(f"Before that, rank 1 on {host} had come this far: it finished {W}")


LONG = "d" * 150


def wait_in(file: str, how: str) -> None:
    """Waits in a file of this name, at line 3, for a rank that does not come."""
    start_together()
    program = compile(
        f"def wait(comm, x):\n  work = comm.all_reduce_async(x)\n  {how}", file, "exec"
    )
    functions: dict[str, Any] = {}
    exec(program, functions)
    with gradring.init(stall_timeout=STALL_S) as comm:
        if comm.rank == 0:
            functions["wait"](comm, np.ones(10, np.float32))
        else:
            until_records_are_left(2)


@pytest.mark.slow  # the test above has a place
@pytest.mark.parametrize(
    ("file", "how", "place"),
    [
        ("train.py", "work.wait()", "train.py:3"),
        ("/home/me/train.py", "comm.barrier()", "/home/me/train.py:3"),
        (f"{LONG}/train.py", "comm.all_gather(x)", f"...{'d' * 91}/train.py:3"),
        ("gr\u00f6\u00dfe.py", "[None for _ in range(99) if work.wait()]", "gr\u00f6\u00dfe.py:3"),
    ],
)
def test_the_place_is_where_the_program_waits(
    tmp_path: Path, file: str, how: str, place: str
) -> None:
    directory = tmp_path / "flight"
    environ = {"GRADRING_FLIGHT_DIR": str(directory)}
    run_ranks(wait_in, 2, file, how, env=environ, check=False)
    records = read(directory)
    *_, waited = [call.place for call in records[0].collectives]
    assert waited == place
    assert f" s ({place})." in " ".join(explain(records))


def test_each_attempt_of_a_launcher_has_its_own_records(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, gradring\n"
        "attempt = os.environ['GRADRING_RESTART']\n"
        "with gradring.init() as comm:\n"
        "    comm.barrier()\n"
        "    raise ValueError(f'attempt {attempt}')\n"
    )
    flight = tmp_path / "flight"
    older = flight / "attempt-7" / "rank-0.json"
    older.parent.mkdir(parents=True)
    older.write_text("of an earlier run")
    monkeypatch.setenv("GRADRING_FLIGHT_DIR", str(flight))
    run = ["run", "-np", "2", "--max-restarts", "1", "--", sys.executable, str(program)]
    assert cli.main(run) == 1
    assert not older.exists()
    capfd.readouterr()
    assert cli.main(["explain", str(flight)]) == 0
    said = capfd.readouterr().out.splitlines()
    assert [line for line in said if line.endswith(":")] == [
        f"{flight / 'attempt-0'}:",
        f"{flight / 'attempt-1'}:",
    ]
    failures = [line for line in said if line.startswith("The group failed")]
    assert ["attempt 0" in failures[0], "attempt 1" in failures[1]] == [True, True]


def test_a_log_directory_gets_the_flight_records_and_the_launcher_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GRADRING_FLIGHT_DIR", raising=False)
    program = tmp_path / "program.py"
    program.write_text(
        "import gradring\n"
        "with gradring.init() as comm:\n"
        "    comm.barrier()\n"
        "    if comm.rank == 1: raise ValueError('no data')\n"
        "    comm.all_reduce(1.0, name='loss')\n"
    )
    logs = tmp_path / "logs"
    older = logs / "flight" / "rank-2.json"
    older.parent.mkdir(parents=True)
    older.write_text("of an earlier run")
    run = ["run", "-np", "2", "--log-dir", str(logs), "--", sys.executable, str(program)]
    assert cli.main(run) == 1
    assert not older.exists()
    explain_them = ["explain", str(logs / "flight")]
    assert f"what each rank was doing: gradring {' '.join(explain_them)}" in capfd.readouterr().err
    for named in (logs / "flight", logs):
        assert cli.main(["explain", str(named)]) == 0
        assert "no data" in capfd.readouterr().out


def test_a_directory_without_records_is_told_from_one_that_is_not_there(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file, flight = tmp_path / "file", tmp_path / "logs" / "flight"
    file.touch()
    flight.mkdir(parents=True)
    for named, problem in (
        (file, f"{file} is a file"),
        (tmp_path / "nowhere", f"{tmp_path / 'nowhere'} does not exist"),
        (flight.parent, f"{flight} holds no records of ranks (rank-0.json and so on)"),
    ):
        assert cli.main(["explain", str(named)]) == 2
        advice = "name the directory that GRADRING_FLIGHT_DIR or gradring run --log-dir named"
        assert capfd.readouterr().err.startswith(f"gradring explain: {problem}; {advice}")


def test_a_killed_rank_has_left_nothing_and_the_others_say_where_they_were(tmp_path: Path) -> None:
    env = {"GRADRING_FLIGHT_DIR": str(tmp_path)}
    run_ranks(reduce_until_killed, 3, 2, 10, env=env, check=False)
    sentences = explain(read(tmp_path))
    assert "Rank 2 left no record" in sentences[1]
    # The news may come before the last collective, or overtake the end of the one before.
    w = re.escape("all_reduce(mean) 'w' float32[10]")
    been = re.compile(rf"been in {w} \(#2[01]\)|never entered {w} \(#21\)|finished {w} \(#20\)")
    assert any(been.search(sentence) for sentence in sentences), sentences


def is_asked_and_hangs(pid: int, directory: Path) -> bool:
    file = directory / "rank-0.json"
    file.unlink(missing_ok=True)
    os.kill(pid, signal.SIGUSR2)
    wait_until(file.exists, "rank 0 has written its record")
    last = read(directory)[0].collectives[-1]
    return last.call == W and last.place is not None


def ask(directory: str) -> bool:
    with gradring.init() as comm:
        pid = np.array([os.getpid()])
        comm.broadcast(pid, root=0)
        if comm.rank == 1:
            # Rank 0 answers before it hangs in its collective, and while it does.
            wait_until(lambda: is_asked_and_hangs(int(pid[0]), Path(directory)), "rank 0 hangs")
        comm.all_reduce(np.ones(10, np.float32), name="w")
        comm.barrier()
        return True


def test_a_rank_that_hangs_writes_when_it_is_asked_and_goes_on(tmp_path: Path) -> None:
    environ = {"GRADRING_FLIGHT_DIR": str(tmp_path)}
    assert run_ranks(ask, 2, str(tmp_path), env=environ) == [True, True]
    (record,) = read(tmp_path)
    assert (record.rank, record.reason, record.failure) == (0, "SIGUSR2", None)
    last = record.collectives[-1]
    assert (last.call, last.state, last.ended_ns) == (W, "running", None)
    assert "test_flight_records.py:" in (last.place or "")
    sentences = explain([record])
    assert "Rank 1 left no record" in sentences[0]
    assert f"Rank 0 has been in {W} (#2) since" in sentences[1]


def test_records_of_an_earlier_run_are_removed(tmp_path: Path) -> None:
    stale = tmp_path / "rank-1.json"
    stale.write_text("from an earlier run")
    run_ranks(leave, 2, env={"GRADRING_FLIGHT_DIR": str(tmp_path)})
    assert list(tmp_path.iterdir()) == []


def test_the_next_group_of_a_process_leaves_the_record_of_one_that_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADRING_FLIGHT_DIR", str(tmp_path))
    for reason in ("the first", "the second"):
        comm = gradring.init()
        comm.abort(reason)
    with gradring.init():
        assert cli.main(["explain", str(tmp_path)]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "The group failed" in line]
    assert ["the first" in said[0], "the second" in said[1]] == [True, True]


def test_a_process_that_is_to_join_leaves_the_files_of_the_jobs_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmp_path / "rank-0.json", part_of(tmp_path / "timeline.json", 0, group=1)]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_text("of the job")
    monkeypatch.setenv("GRADRING_FLIGHT_DIR", str(tmp_path))
    monkeypatch.setenv("GRADRING_TRACE", str(tmp_path / "timeline.json"))
    monkeypatch.setattr(observer, "_numbers", itertools.count(1))
    with gradring.init(join="127.0.0.1:1"):
        assert [file.read_text() for file in files] == ["of the job"] * 2
    assert [file.read_text() for file in files] == ["of the job"] * 2


def leave() -> None:
    with gradring.init() as comm:
        comm.barrier()


def record(rank: int, *calls: tuple[int, str, str], failure: str | None = None) -> Record:
    """A record of three ranks' job; calls are (sequence, call, state)."""
    return Record(
        *(rank, 3, f"host-{rank}", "error" if failure else "SIGUSR2", 9_000_000_000, 0),
        *(failure, None, 0),
        tuple(
            Collective(
                *(sequence, call, 40, "ring", state, None, 1_000_000_000, 2_000_000_000, None),
                3_000_000_000 if state == "done" else None,
                None,
            )
            for sequence, call, state in calls
        ),
    )


@pytest.fixture
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("utc")
def test_ranks_that_went_different_ways_are_told_apart() -> None:
    sides = [record(rank, (7, "a" if rank == 2 else "b", "failed")) for rank in range(3)]
    differ = "The ranks went different ways at #7: ranks 0 and 1 called b; rank 2 called a."
    assert explain(sides) == [differ]

    apart = [replace(call, step=2) for call in sides[1].collectives]
    sides_apart = [sides[0], replace(sides[1], collectives=tuple(apart))]
    assert explain(sides_apart)[1:] == [
        "The ranks went different ways at #7: rank 0 called b in step 0; rank 1 called b in step 2."
    ]

    behind = [sides[0], record(1, (6, "b", "done")), sides[2]]
    assert explain(behind) == [
        "The ranks went different ways at #7: rank 0 called b; rank 2 called a.",
        "rank 1 on host-1 never entered #7; ranks 0 and 2 have waited since 00:00:02.000, for "
        "7.0 s.",
        "Before that, rank 1 on host-1 had come this far: it finished b (#6) at 00:00:03.000.",
    ]


@pytest.mark.usefixtures("utc")
def test_a_rank_without_a_record_may_not_have_been_asked() -> None:
    left = "left no record: killed, stopped, on another machine,"
    been = "been in b (#7) since 00:00:02.000, for 7.0 s."
    assert explain([record(1, (7, "b", "running"))]) == [
        f"Ranks 0 and 2 {left} ended well before the others, or not asked.",
        f"Rank 1 has {been}",
    ]
    failed = [record(rank, (7, "b", "failed"), failure="it broke") for rank in (0, 1)]
    assert explain(failed) == [
        "The group failed: it broke",
        f"Rank 2 {left} or ended well before the others.",
        f"Ranks 0 and 1 have {been}",
    ]


def write_to_a_slow_disk() -> str:
    """Rank 0 writes into a pipe that nobody reads; rank 1 ends the group meanwhile."""
    part = Path(os.environ["GRADRING_FLIGHT_DIR"]) / "rank-0.json.part"
    with gradring.init() as comm:
        if comm.rank == 0:
            part.parent.mkdir(exist_ok=True)
            os.mkfifo(part)
            os.kill(os.getpid(), signal.SIGUSR2)
            wait_until(lambda: "gradring-record" in belongings(), "the record is being written")
        comm.barrier()
        if comm.rank == 1:
            comm.abort("enough")
        with pytest.raises(AbortedError) as heard:
            while True:
                comm.barrier()
        if comm.rank == 0:
            # The disk has written it.
            with part.open("rb") as disk:
                disk.read()
        return str(heard.value)


def test_a_disk_that_is_slow_with_a_record_silences_no_rank(tmp_path: Path) -> None:
    env = {"GRADRING_FLIGHT_DIR": str(tmp_path / "flight")}
    for text in run_ranks(write_to_a_slow_disk, 2, env=env):
        assert "enough" in text


def test_a_record_from_before_the_failure_is_called_old() -> None:
    old = record(1, (3, "a", "running"))
    others = [record(rank, (7, "b", "failed"), failure="it broke") for rank in (0, 2)]
    sentences = explain([others[0], old, others[1]])
    assert sentences[0] == "The group failed: it broke"
    assert sentences[1].startswith("Rank 1 left none when the group failed; its last one is of ")
    assert sentences[2].startswith("Ranks 0 and 2 have been in b (#7) since ")


def test_ranks_that_wait_at_different_places_are_told_apart() -> None:
    def waits(rank: int, place: str | None) -> Record:
        one = record(rank, (7, "b", "running"), (8, "c", "queued"))
        first, second = one.collectives
        # A program that has started two waits for the second only.
        return replace(one, collectives=(first, replace(second, place=place)))

    def said(*places: str | None) -> str:
        return explain([waits(rank, place) for rank, place in enumerate(places)])[0]

    been = r"Ranks 0, 1 and 2 have been in b \(#7\) since [\d:.]+, for 7\.0 s"
    assert re.fullmatch(rf"{been} \(train\.py:31\)\.", said("train.py:31", *["train.py:31"] * 2))
    apart = said("train.py:31", "eval.py:9", "train.py:31")
    assert re.fullmatch(rf"{been} \(ranks 0 and 2 at train\.py:31; rank 1 at eval\.py:9\)\.", apart)
    assert re.fullmatch(rf"{been} \(rank 1 at eval\.py:9\)\.", said(None, "eval.py:9", None))
    assert re.fullmatch(rf"{been}\.", said(None, None, None))


def test_who_waits_for_a_partner_is_not_said_to_have_stayed_away() -> None:
    waits = record(1)
    recv = replace(record(0, (1, "recv(source=2) 'x'", "failed")).collectives[0], place="a.py:3")
    waits = replace(waits, channels=(Channel(2, (recv,)),))
    sentences = explain([record(0, (7, "b", "running")), waits, record(2, (6, "b", "done"))])
    assert sentences[0].startswith("rank 2 on host-2 never entered b (#7); rank 0 has waited since")
    assert re.fullmatch(
        r"rank 1 on host-1 was in recv\(source=2\) 'x' since .*, for .* s \(a\.py:3\)\.",
        sentences[-1],
    )


@pytest.mark.usefixtures("utc")
def test_who_waits_for_nobody_is_said_to_be_in_no_collective() -> None:
    done, begun, waits = record(
        0, (1, "send(dest=1)", "done"), (2, "send(dest=2)", "running"), (3, "recv(source=2)", "run")
    ).collectives
    waits = replace(waits, state="running", place="a.py:3")
    # It has sent, and what it has begun in advance keeps it from nothing.
    first = replace(
        record(0, (1, "b", "done")), channels=(Channel(1, (done,)), Channel(2, (begun,)))
    )
    second = replace(record(1), channels=(Channel(2, (waits,)),))
    assert explain([first, second, record(2)]) == [
        "rank 0 on host-0 is in no collective; it finished b (#1) at 00:00:03.000.",
        "rank 2 on host-2 is in no collective; it had finished no collective.",
        "rank 1 on host-1 was in recv(source=2) since 00:00:02.000, for 7.0 s (a.py:3).",
    ]


def test_a_rank_that_has_gone_on_is_mentioned() -> None:
    ahead = record(0, (7, "b", "done"))
    sentences = explain([ahead, record(1, (7, "b", "running")), record(2, (6, "b", "done"))])
    assert sentences[0].startswith("rank 2 on host-2 never entered b (#7); rank 1 has waited since")
    assert sentences[-1] == "Rank 0 had already finished #7."


ROW = {
    **{"sequence": 1, "call": "barrier", "bytes": 0, "algorithm": "ring", "state": "queued"},
    **{"last": None, "launched_ns": 1, "started_ns": None, "entered_ns": None, "ended_ns": None},
    "awaited_ns": None,
}


def file_of(row: Any, **facts: int) -> bytes:
    """What a rank writes of one collective."""
    head = {"rank": 0, "world_size": 1, "host": "h", "reason": "", "forgotten": 0}
    head["generation"] = 0
    rest = {"written_ns": 1, "clock": None, "failure": None, "format": FORMAT}
    return json.dumps({**head, **rest, "collectives": [row], **facts}).encode()


@pytest.mark.parametrize("row", [{}, {**ROW, "launched_ns": None}, {**ROW, "ended_ns": "1"}, 3])
def test_a_record_of_collectives_that_cannot_be_is_refused(row: Any) -> None:
    assert parse(file_of(ROW)).collectives[0].launched_ns == 1
    for text in (file_of(row), json.dumps({"format": FORMAT}).encode()):
        with pytest.raises(ValueError, match="it is no record of a rank"):
            parse(text)


def test_records_of_an_earlier_group_of_an_elastic_job_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for rank, world_size, generation in ((0, 2, 1), (1, 2, 1), (2, 3, 0)):
        text = file_of(ROW, rank=rank, world_size=world_size, generation=generation)
        (tmp_path / f"rank-{rank}.json").write_bytes(text)
    assert [(record.rank, record.world_size) for record in read(tmp_path)] == [(0, 2), (1, 2)]
    assert "rank-2.json is left out: it is of an earlier group" in caplog.text


def test_records_of_another_version_or_of_several_jobs_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, world_size in ((0, 2), (1, 3)):
        text = file_of(ROW, rank=rank, world_size=world_size)
        (tmp_path / f"rank-{rank}.json").write_bytes(text)
    assert cli.main(["explain", str(tmp_path)]) == 2
    several = f"{tmp_path} holds records of several jobs; remove the older files\n"
    assert capsys.readouterr().err == f"gradring explain: {several}"
    newer = tmp_path / "rank-1.json"
    newer.write_bytes(file_of(ROW, rank=1, world_size=2, format=FORMAT + 1))
    assert cli.main(["explain", str(tmp_path)]) == 2
    assert (
        f"{newer} cannot be read (format {FORMAT + 1} was written by another version); remove"
        in (capsys.readouterr().err)
    )
