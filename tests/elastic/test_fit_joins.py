"""Processes that join `fit`, where those that are there have made metrics and more long before."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

JOB = Path(__file__).with_name("fit_job.py")
RANKS, ROWS = 3, 96
TIMEOUT_S = 600.0
#: Of a sum of so many rows in float32, relative to it, in whatever order they are added.
TOLERANCE = ROWS * 2.0**-24


@dataclass
class Told:
    """What the processes of a job have told that have come to its end."""

    job: str
    processes: list[list[dict[str, Any]]]

    def last(self, what: str) -> list[dict[str, Any]]:
        """Of each process the last fact of a kind."""
        return [[fact for fact in facts if fact["what"] == what][-1] for facts in self.processes]


def told_by(directory: Path, job: str, first: int) -> Told:
    """Runs a job of so many first ranks; every process that has been lost is replaced."""
    command = ["run", "-np", str(first), "--min-np", "1", "--max-np", str(RANKS)]
    command += ["--hosts", f"localhost:{RANKS}"]
    program = [sys.executable, str(JOB), str(directory), job]
    done = subprocess.run(
        [sys.executable, "-m", "gradring", *command, "--", *program],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    files = [path.read_text().splitlines() for path in sorted(directory.glob("*.told"))]
    facts = [[json.loads(line) for line in lines] for lines in files]
    return Told(job, [each for each in facts if each[-1]["what"] == "end"])


#: By job: how many begin, and which of those that come to the end have joined. `fit_job` says who
#: is lost.
JOBS = {
    "metrics": (RANKS, [False, True, True]),
    "grows": (1, [False, True, True]),
    "mixed": (RANKS, [False, False, True]),
}


@pytest.fixture(
    scope="module", params=["metrics", "grows", pytest.param("mixed", marks=pytest.mark.slow)]
)
def told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Told:
    """Of each job."""
    first, _ = JOBS[request.param]
    return told_by(tmp_path_factory.mktemp(request.param), request.param, first)


def test_others_join_a_fit_and_take_the_places_of_those_that_are_lost(told: Told) -> None:
    ends = told.last("end")
    assert sorted(end["joined"] for end in ends) == JOBS[told.job][1]
    assert {(end["rank"], end["size"]) for end in ends} == {(rank, RANKS) for rank in range(RANKS)}


def test_all_have_the_same_weights_optimizer_and_metrics_to_the_last_bit(told: Told) -> None:
    ends = told.last("end")
    assert len({end["digest"] for end in ends}) == 1
    assert ends[0]["found"] == ends[1]["found"] == ends[2]["found"]
    epochs = told.last("epoch ends")
    assert epochs[0]["logs"] == epochs[1]["logs"] == epochs[2]["logs"]


def test_metrics_count_every_row_of_an_epoch_once(told: Told) -> None:
    for epoch in told.last("epoch ends"):
        assert epoch["logs"]["rows"] == ROWS
        assert epoch["logs"]["val_rows"] == ROWS / 2


def test_metrics_that_a_callback_makes_and_keeps_are_those_of_all_ranks(told: Told) -> None:
    for epoch in told.last("epoch ends"):
        assert epoch["own"] == {"mean": 2.0, "area": 1.0}


@pytest.mark.parametrize("told", ["metrics"], indirect=True)
def test_metrics_are_those_of_one_process_with_the_same_weights(told: Told) -> None:
    for end in told.last("end"):
        assert end["found"] == pytest.approx(end["expected"], rel=TOLERANCE)
