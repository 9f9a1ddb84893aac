"""A log directory gets the numbers of all steps, unasked, and never more than it has room for."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest

import gradring
from gradring.observe import step_log
from gradring.observe.step_log import StepLog
from gradring.tools.cli import main

PROGRAM = """
import io, os, sys, time, gradring, numpy as np
with gradring.init() as comm:
    with gradring.Monitor(comm, every_steps=5, samples_per_step=8, stream=io.StringIO()) as monitor:
        for step in range(21):
            comm.all_reduce(np.ones(10, np.float32))
            monitor.step(loss=float("nan") if step == 20 else 1.0)
    sys.exit(int(os.environ["GRADRING_RESTART"]) == 0)
"""


def test_the_launchers_log_directory_gets_the_steps_of_all_attempts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    logs = tmp_path / "logs"
    logs.mkdir()
    for name in ("steps.jsonl", "steps.jsonl.1"):
        (logs / name).write_text("an earlier run\n")
    run = ["run", "-np", "2", "--max-restarts", "1", "--log-dir", str(logs), "--"]
    assert main([*run, sys.executable, str(program)]) == 0, capfd.readouterr().err
    kept = {"rank-0.log", "rank-1.log", "steps.jsonl", "flight"}
    assert {path.name for path in logs.iterdir()} == kept
    rows = [json.loads(line) for line in (logs / "steps.jsonl").read_text().splitlines()]
    assert [(row["attempt"], row["step"]) for row in rows] == [
        (attempt, step) for attempt in (0, 1) for step in (6, 11, 16, 21)
    ]
    assert [row["loss"] for row in rows[:4]] == [1.0, 1.0, 1.0, "nan"]
    assert rows[-1]["samples_per_s"] == pytest.approx(8 * rows[-1]["steps_per_s"])
    assert {"step_ms", "compute_ms", "comm_ms", "wait_ms"} < set(rows[-1]["ranks"]["0"])


def test_a_log_begins_anew_when_it_is_full(tmp_path: Path) -> None:
    path = tmp_path / "new" / "steps.jsonl"
    log = StepLog(path, limit_bytes=100)
    for number in range(50):
        log.write({"number": number})
        sizes = [file.stat().st_size for file in path.parent.iterdir()]
        assert sum(sizes) <= 2 * 100 + len('{"number": 49}\n')
    log.close()
    lines = [*step_log.older(path).read_text().splitlines(), *path.read_text().splitlines()]
    numbers = [json.loads(line)["number"] for line in lines]
    assert numbers == list(range(numbers[0], 50))


def test_a_disk_that_is_full_ends_the_log_and_not_the_training(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = StepLog("/dev/full")
    for number in range(3):
        log.write({"number": number})
    log.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"/dev/full on {socket.gethostname()} cannot be written any more (No space left on device)"
    ]


@pytest.mark.parametrize("by_variable", [True, False])
def test_a_directory_that_cannot_be_made_is_told_and_no_error(
    by_variable: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "file"
    file.touch()
    if by_variable:
        monkeypatch.setenv("GRADRING_LOG_DIR", str(file))
    with gradring.init() as comm:
        gradring.Monitor(comm, log=None if by_variable else file / "steps.jsonl")
    assert f"no steps.jsonl is written: {file}: " in caplog.text
