"""The live line and the table add up and name the slow rank; nobody waits for a missing monitor."""

from __future__ import annotations

import errno
import io
import json
import re
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import gradring
from gradring import errors
from gradring.observe import monitor, step_report
from gradring.observe.step_report import Totals
from gradring.testing import run_ranks
from support.pairs import Pair
from support.waiting import wait_until

LINE = re.compile(
    r"step (\d+) \| ([\d.]+) ms = compute ([\d.]+) \+ comm ([\d.]+) \+ wait ([\d.]+) \| "
    r"[\d.]+k? samples/s \| slowest: rank 1 \S+ \+([\d.]+) ms"
)


def train(slow: int, slow_s: float, steps: int, with_monitor: tuple[int, ...]) -> str:
    output = io.StringIO()
    with gradring.init() as comm:
        if len(with_monitor) == comm.world_size:
            # Nobody's last numbers are missing in the table, however busy the machine is.
            monitor.FAREWELL_S = 30.0
        x = np.ones(1000, np.float32)
        watch = None
        if comm.rank in with_monitor:
            watch = gradring.Monitor(comm, samples_per_step=64, every_steps=20, stream=output)
        for _ in range(steps):
            time.sleep(slow_s if comm.rank == slow else 0.01)
            comm.all_reduce(x, name="g")
            if watch is not None:
                watch.step()
        if watch is not None:
            watch.finish()
        comm.barrier()
    return output.getvalue()


def test_lines_and_table_name_the_slow_rank() -> None:
    first, second, third = run_ranks(train, 3, 1, 0.2, 45, (0, 1, 2))
    assert second == third == ""
    lines = first.splitlines()
    shown = [LINE.fullmatch(line) for line in lines[:2]]
    assert all(shown), lines
    for match, step in zip(shown, ("21", "41"), strict=True):
        assert match is not None
        assert match[1] == step
        step_ms, *parts, late_ms = map(float, match.groups()[1:])
        assert sum(parts) == pytest.approx(step_ms, rel=0.05, abs=1)
        assert parts[2] > 20 and late_ms > 20
    assert [line.split()[:3] for line in lines[3:6]] == [
        [str(rank), lines[3].split()[1], "44"] for rank in range(3)
    ]
    assert lines[6].startswith("Rank 1 on ")
    assert "is the slowest" in lines[6]


def log(path: str) -> list[dict[str, Any]]:
    seen: list[dict[str, Any]] = []
    with gradring.init() as comm:
        watch = gradring.Monitor(
            comm, every_steps=10, stream=io.StringIO(), log=path, on_line=seen.append
        )
        for _ in range(21):
            with watch.input():
                time.sleep(0.01)
                comm.barrier()
            watch.step()
        watch.finish()
        comm.barrier()
    return seen


def test_a_log_has_the_numbers_of_every_line(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text("an earlier run\n")
    seen, nothing = run_ranks(log, 2, str(path))
    assert nothing == []
    earlier, *rows = path.read_text().splitlines()
    assert earlier == "an earlier run"
    assert [json.loads(row) for row in rows] == seen
    assert [row["step"] for row in seen] == [11, 21]
    own = seen[-1]["ranks"]["0"]
    assert own["input_ms"] >= 10
    parts = own["compute_ms"] + own["input_ms"] + own["comm_ms"] + own["wait_ms"]
    assert parts == pytest.approx(own["step_ms"])
    assert own["step_ms"] == pytest.approx(1000 / seen[-1]["steps_per_s"])
    assert seen[-1]["samples_per_s"] is None


def test_a_rank_without_a_monitor_is_only_missing_in_the_table() -> None:
    first, second = run_ranks(train, 2, 1, 0.1, 25, (0,))
    assert second == ""
    assert "no monitor" in first
    assert "Rank 1 on " in first.splitlines()[-1]


def train_twice() -> str:
    output = io.StringIO()
    monitor.FAREWELL_S = 30.0
    with gradring.init() as comm:
        for steps in (5, 2):
            with gradring.Monitor(comm, stream=output) as watch:
                for _ in range(1 + steps):
                    comm.barrier()
                    watch.step()
                if comm.rank == 1:
                    wait_until(partial(has_done, comm, steps), "rank 0 makes its table")
    return output.getvalue()


def has_done(comm: gradring.Communicator, steps: int) -> bool:
    """Whether rank 0 has ended its monitor after so many steps."""
    notes = [gossip["note"] for gossip in comm._native.gossip() if gossip["rank"] == 0]
    totals = [Totals.from_note(note) for note in notes]
    return any(total is not None and total.ended and total.steps == steps for total in totals)


def test_a_second_table_has_no_row_of_the_monitor_before() -> None:
    first, _ = run_ranks(train_twice, 2)
    rows = [line.split() for line in first.splitlines() if re.match(r" +\d ", line)]
    assert [(row[0], row[2]) for row in rows] == [("0", "5"), ("1", "5"), ("0", "2"), ("1", "2")]


def test_steps_are_numbered_from_where_a_restart_goes_on() -> None:
    output = io.StringIO()
    with gradring.init() as comm:
        watch = gradring.Monitor(comm, every_steps=5, stream=output, first_step=100)
        for step in range(11):
            watch.step(loss=0.5 / (step + 1))
    lines = [line.split(" | ") for line in output.getvalue().splitlines()]
    assert [line[0] for line in lines] == ["step 106", "step 111"]
    assert [line[3] for line in lines] == ["loss 0.08333", "loss 0.04545"]


def test_a_pause_is_no_step() -> None:
    with gradring.init() as comm:
        watch = gradring.Monitor(comm, stream=io.StringIO())
        for _ in range(4):
            watch.step()
        watch.pause()
        time.sleep(0.5)
        watch.step()
        row = watch.finish().splitlines()[1].split()
    assert row[2] == "4"
    assert float(row[3]) < 100


def test_a_rank_that_says_nothing_is_not_waited_for_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(monitor, "FAREWELL_S", 0.0)
    with Pair() as pair:
        watch = gradring.Monitor(pair.comm, stream=io.StringIO())
        watch.resume()  # before the first step, nothing has been paused
        for _ in range(3):
            watch.step()
        _, own, other, _ = watch.finish().splitlines()
    assert own.split()[0::2][:2] == ["0", "2"]
    assert other.split()[0] == "1" and other.endswith("no monitor")


def test_an_error_in_a_pause_is_no_half_step_of_the_group() -> None:
    def reduced() -> list[float]:
        works = [each.all_reduce_async(np.ones(1)) for each in (pair.comm, pair.peer)]
        return [float(work.wait()[0]) for work in works]

    lines = io.StringIO()
    with Pair() as pair:
        with (
            pytest.raises(ValueError, match="in the evaluation"),
            gradring.Monitor(pair.comm, stream=lines) as watch,
        ):
            watch.step()
            assert reduced() == [2.0, 2.0]
            watch.pause()
            raise ValueError("in the evaluation")
        assert reduced() == [2.0, 2.0], "the group goes on"
    assert lines.getvalue() == ""


def measure_batches(norms: list[float]) -> tuple[str, list[dict[str, Any]]]:
    output = io.StringIO()
    rows: list[dict[str, Any]] = []
    monitor.FAREWELL_S = 30.0
    with gradring.init() as comm:
        watch = gradring.Monitor(comm, every_steps=10, stream=output, on_line=rows.append)
        for step in range(21):
            # The others' numbers come about once a second.
            time.sleep(0.1)
            comm.barrier()
            norm = np.float32(norms[comm.rank])
            own = {"loss": comm.rank + 1 / (step + 1), "gradient_norm": norm}
            watch.step(loss=0.5, metrics=own if step % 2 else own.copy)
        watch.finish()
        comm.barrier()
    return output.getvalue(), rows


def test_metrics_of_each_ranks_own_batches_are_shown_and_an_unusual_gradient_is_named() -> None:
    (text, rows), *others = run_ranks(measure_batches, 3, [1.0, 30.0, 1.5])
    assert [text for text, _ in others] == ["", ""]
    first, last, header, *table = text.splitlines()
    assert header.split()[-5:] == ["others", "waited", "loss", "gradient", "norm"]
    assert [row.split()[-2:] for row in table[:3]] == [
        ["0.04762", "1"],
        ["1.048", "30"],
        ["2.048", "1.5"],
    ]
    assert last.endswith(" | gradient of rank 1 has norm 30, the median is 1.5"), (first, last)
    assert table[4].startswith("The gradient of rank 1 on ")
    assert table[4].endswith(" has norm 30, and the median is 1.5: look at its data.")
    assert rows[-1]["loss"] == 0.5
    assert rows[-1]["ranks"]["0"]["loss"] == pytest.approx(1 / 21)
    assert rows[-1]["ranks"]["1"]["gradient_norm"] == 30


def test_a_gradient_that_is_not_finite_is_named_and_two_that_differ_are_not() -> None:
    def totals(*norms: float) -> dict[int, Totals]:
        return {rank: Totals(metrics={"gradient_norm": norm}) for rank, norm in enumerate(norms)}

    assert step_report.unusual(totals(1.0, 100.0)) == []
    assert step_report.unusual(totals(1.0, 1.0, 0.05)) == [(2, 0.05, 1.0)]
    assert step_report.unusual(totals(1.0, float("inf"))) == [(1, float("inf"), None)]
    assert step_report.unusual({0: Totals(), **totals(1.0)}) == []


@pytest.mark.parametrize(
    "metrics",
    [{str(number): 1.0 for number in range(7)}, {"": 1.0}, {"x" * 33: 1.0}, {"a\nb": 1.0}],
)
def test_metrics_that_could_not_travel_are_refused(metrics: dict[str, float]) -> None:
    with gradring.init() as comm:
        watch = gradring.Monitor(comm, every_steps=1, stream=io.StringIO())
        watch.step(metrics=metrics)
        with pytest.raises(errors.ConfigError, match=r"Monitor\.step: metrics: .*; leave it out"):
            watch.step(metrics=metrics)


def test_what_has_no_communicator_is_refused() -> None:
    with pytest.raises(errors.ConfigError, match=r"needs a gradring\.Communicator"):
        gradring.Monitor(object())
    with gradring.init() as comm:
        with pytest.raises(errors.ConfigError, match="every_steps=0"):
            gradring.Monitor(comm, every_steps=0)
        for every_s in cast("list[float]", [0.0, -1.0, float("nan"), "5", None]):
            with pytest.raises(errors.ConfigError, match=f"every_s={every_s!r} is not a number of"):
                gradring.Monitor(comm, every_s=every_s)


@pytest.mark.parametrize("port", [0, -5, 70000, "9100", 9100.0, True])
def test_a_port_for_metrics_that_is_none_is_refused(port: Any) -> None:
    with gradring.init() as comm, pytest.raises(errors.ConfigError, match="prometheus_port="):
        gradring.Monitor(comm, prometheus_port=port)


def test_the_verdict_says_what_limits_the_steps() -> None:
    def verdict(comm_s: float, wait_s: float) -> str:
        totals = {rank: Totals(10, 1.0, comm_s, wait_s) for rank in range(2)}
        return step_report.verdict(totals, {}, ["a", "b"])

    assert "90% of the time is spent computing" in verdict(0.06, 0.04)
    assert "50% of the time goes into moving bytes" in verdict(0.5, 0.1)
    assert "40% of the time is spent waiting" in verdict(0.1, 0.4)


def test_line_and_verdict_say_whose_input_is_slow() -> None:
    totals = {
        0: Totals(10, 0.5, 0.01, 0.3, {1: 0.3}, input_s=0.01),
        1: Totals(10, 0.5, 0.01, 0.0, input_s=0.32),
    }

    def line(rank: int, reading_s: float = 0.32) -> str:
        since = {0: totals[0], 1: replace(totals[1], input_s=reading_s)}
        return step_report.Interval(10, since[rank], since, ["a", "b"]).line()

    slow = " | 20 steps/s | slowest: rank 1 b +30 ms"
    reads = "compute 19 + comm 1.0 + wait 30" + slow + " (input)"
    assert line(0) == "step 10 | 50 ms = " + reads
    assert "50 ms = compute 17 + input 32 + comm 1.0 + wait 0.00" + slow in line(1)
    assert line(0, 0.1).endswith(slow)
    waits = {rank: step_report.per_step(total) for rank, total in totals.items()}
    said = step_report.verdict(totals, waits, ["a", "b"])
    assert said.startswith("Rank 1 on b is the slowest")
    assert "60% of the time; its input takes 32.0 ms of a step, which gradring run" in said
    alike = {rank: Totals(10, 0.5, input_s=0.2) for rank in range(2)}
    said = step_report.verdict(alike, {}, ["a", "b"])
    assert "40% of the time is spent reading data" in said and "--input-workers" in said


def test_the_table_of_a_worker_says_how_long_it_waits_for_servers() -> None:
    _, row, said = step_report.table({0: Totals(10, 1.0, wait_s=0.4)}, ["a"], worker=3).splitlines()
    assert row.split()[:3] == ["3", "a", "10"]
    assert said == "Worker 3 is in pulls, and waits for servers, 40% of its time."


def test_the_table_says_what_input_workers_took_and_what_ranks_waited() -> None:
    totals = {
        0: Totals(10, 1.0, input_s=0.3, made_s=1.5),
        1: Totals(10, 1.0, input_s=0.1, made_s=0.5),
    }
    *_, said, served = step_report.table(totals, ["a", "b"]).splitlines()
    assert "20% of the time is spent reading data: more input workers would help" in said
    assert served == (
        "Input workers took 200.0 ms for the data of a step; a rank waited 20.0 ms for it."
    )
    without = {rank: replace(total, made_s=0.0) for rank, total in totals.items()}
    assert "Input workers" not in step_report.table(without, ["a", "b"])
    counted = totals[0].minus(Totals(5, 0.5, made_s=1.0))
    assert (counted.steps, counted.made_s) == (5, 0.5)
    assert Totals.from_note(totals[0].to_note()) == totals[0]


def test_a_note_survives_and_nonsense_is_no_note() -> None:
    metrics = {"loss": 0.75, "accuracy": 0.5}
    totals = Totals(3, 1.5, 0.25, 0.5, {1: 0.5}, ended=True, input_s=0.125, metrics=metrics)
    assert Totals.from_note(totals.to_note()) == totals
    for nonsense in (b"", b"{}", b"[]", b"\xff", b'{"late_s": 3}'):
        assert Totals.from_note(nonsense) is None
    late_s = {rank: 1e9 + rank / 7 for rank in range(5000)}
    metrics = {f"{number:>032}": -1e-300 / 3 for number in range(6)}
    largest = Totals(2**62, 1e9 / 7, 1e9 / 7, 1e9 / 7, late_s, input_s=1e9 / 7, metrics=metrics)
    assert len(largest.to_note()) <= 1024


def test_a_peer_that_a_note_did_not_list_has_not_been_waited_for_all_at_once() -> None:
    before = Totals(10, late_s={rank: 5.0 + rank for rank in range(8)})
    after = Totals(20, late_s={0: 6.0, 9: 5.5})
    assert after.minus(before).late_s == {0: 1.0, 9: 0.5}
    assert after.minus(Totals(10, late_s={0: 5.0})).late_s == {0: 1.0, 9: 5.5}


class Full(io.StringIO):
    def write(self, _: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_ends_no_training() -> None:
    with gradring.Communicator(0, 1) as comm:
        with gradring.Monitor(comm, stream=Full(), every_steps=1) as watch:
            for _ in range(3):
                watch.step()
        assert watch.totals.steps == 2
