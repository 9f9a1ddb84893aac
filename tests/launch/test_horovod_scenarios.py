"""The scenarios by which Horovod judges its own elastic jobs, driven against `gradring run`.

Those of Horovod's `test/integration/elastic_common.py`: hosts are added and removed; one rank
fails, by an exception or a signal; all fail; hosts are given up; there are too few workers for too
long; restarts have a bound.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import ssh_stand_in
from launching import DEADLINE_S, hosts_script

from support.commands import command_line

PROGRAM = """\
import json, os, signal, sys, time
import numpy as np
import gradring.elastic

HERE, PLAN = sys.argv[1], json.loads(sys.argv[2])
HOST = os.environ.get("SSH_HOST", "localhost")
comm = gradring.init()
state = gradring.elastic.State(epoch=0, total=np.zeros(1))

def fail(rank):
    # Once in a job, or each time.
    mark = f"{HERE}/failed-{rank}"
    if os.path.exists(mark) and not PLAN.get("always"):
        return
    open(mark, "w").close()
    if PLAN["how"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError(f"rank {rank} fails as planned")

@gradring.elastic.run(comm, min_workers=PLAN["least"], max_workers=PLAN["most"],
                      timeout=PLAN.get("timeout", 60.0))
def train(state):
    while state.epoch < PLAN["epochs"]:
        if state.epoch == 1 and comm.rank in PLAN.get("fails", []) and (
            comm.generation == 1 or PLAN.get("always")):
            fail(comm.rank)
        # An epoch begins when the job is as large as it is to be.
        sizes = PLAN.get("sizes")
        while sizes and comm.world_size != sizes[state.epoch]:
            time.sleep(0.02)
            state.commit()
        state.total += comm.all_reduce(np.ones(1), op="mean")
        state.epoch += 1
        if comm.rank == 0:
            with open(f"{HERE}/epochs", "a") as log:
                line = {"size": comm.world_size, "host": HOST, "generation": comm.generation}
                log.write(json.dumps(line) + "\\n")
            open(f"{HERE}/list-{state.epoch}", "w").close()
        state.commit()
    return float(state.total[0])

assert train(state) == PLAN["epochs"], state.total
"""

pytestmark = ssh_stand_in.needs_addresses


class Job:
    """A job that has ended."""

    def __init__(self, directory: Path, launch: Sequence[object], **plan: Any) -> None:
        self._directory = directory
        (directory / "program.py").write_text(PROGRAM)
        plan = {"epochs": 3, "least": 1, "most": 4, "how": "kill", **plan}
        program = [sys.executable, directory / "program.py", directory, json.dumps(plan)]
        variables = ssh_stand_in.install(directory)
        done = subprocess.run(
            command_line("run", *launch, "--grace", 5, "--", *program),
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=2 * DEADLINE_S,
            check=False,
        )
        self.exit_code, self.said = done.returncode, done.stdout + done.stderr
        log = directory / "epochs"
        lines = log.read_text().splitlines() if log.exists() else []
        self.epochs: list[dict[str, Any]] = [json.loads(line) for line in lines]

    def sizes(self) -> list[int]:
        """Of the group, by epoch."""
        return [epoch["size"] for epoch in self.epochs]

    def never_got_beyond_the_first_epoch_of(self, size: int) -> bool:
        """A group does it again if a rank fails before all have committed it.

        So does the job if one that has failed is started again before the last one fails.
        """
        return set(self.sizes()) == {size} and not (self._directory / "list-2").exists()

    def generations(self) -> list[int]:
        """Of the group, by epoch."""
        return [epoch["generation"] for epoch in self.epochs]


@pytest.mark.parametrize("slots", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_hosts_are_added_and_removed(tmp_path: Path, slots: int) -> None:
    script = hosts_script(
        tmp_path,
        f"127.0.0.1:{slots}",
        f"127.0.0.1:{slots}\nme@127.0.0.2:{slots}",
        f"me@127.0.0.2:{slots}",
    )
    sizes = [slots, 2 * slots, slots]
    job = Job(
        tmp_path,
        ["-np", slots, "--min-np", slots, "--max-np", 2 * slots, "--host-discovery-script", script],
        sizes=sizes,
        most=2 * slots,
    )
    assert (job.exit_code, job.sizes()) == (0, sizes), job.said
    assert job.epochs[0]["host"] == "localhost"
    assert job.epochs[2]["host"] == "127.0.0.2"
    assert job.generations() == sorted(set(job.generations()))


@pytest.mark.parametrize(
    ("how", "discovers"),
    [
        ("kill", True),
        pytest.param("exception", False, marks=pytest.mark.slow),
        pytest.param("exception", True, marks=pytest.mark.slow),
        pytest.param("kill", False, marks=pytest.mark.slow),
    ],
)
def test_a_single_rank_fails(tmp_path: Path, how: str, discovers: bool) -> None:
    hosts = ["--hosts", "127.0.0.1:2,me@127.0.0.2:2"]
    if discovers:
        hosts = [
            "--host-discovery-script",
            str(hosts_script(tmp_path, "127.0.0.1:2\nme@127.0.0.2:2")),
        ]
    launch = ["-np", 4, "--min-np", 2, "--max-np", 4, *hosts]
    # It is replaced; Horovod gives its host up instead, and goes on with the other one.
    job = Job(tmp_path, launch, fails=[0], how=how, sizes=[4, 3, 4])
    assert (job.exit_code, job.sizes()) == (0, [4, 3, 4]), job.said
    assert job.generations()[0] == 1
    assert "it is started again in 1 s, to join the others" in job.said


@pytest.mark.parametrize(
    ("each", "options"),
    [(2, []), pytest.param(1, ["--host-failures", 1], marks=pytest.mark.slow)],
    ids=["all ranks fail", "all hosts are given up"],
)
def test_all_ranks_fail(tmp_path: Path, each: int, options: list[object]) -> None:
    launch = ["-np", 2 * each, "--min-np", 2, "--hosts", f"127.0.0.1:{each},me@127.0.0.2:{each}"]
    fails = list(range(2 * each))
    job = Job(tmp_path, [*launch, *options], fails=fails, how="exception", least=2, always=True)
    assert job.exit_code == 1, job.said
    assert job.never_got_beyond_the_first_epoch_of(2 * each), job.epochs
    assert "fails as planned" in job.said


def test_a_host_that_was_given_up_comes_back(tmp_path: Path) -> None:
    launch = ["-np", 2, "--min-np", 1, "--hosts", "127.0.0.1:1,me@127.0.0.2:1"]
    options = ["--host-failures", 1, "--host-cooldown", 1]
    job = Job(tmp_path, [*launch, *options], fails=[1], sizes=[2, 1, 2])
    assert (job.exit_code, job.sizes()) == (0, [2, 1, 2]), job.said
    assert "127.0.0.2 is given up for 1 s after 1 failures in a row" in job.said


@pytest.mark.slow
def test_there_are_too_few_workers_for_too_long(tmp_path: Path) -> None:
    launch = ["-np", 4, "--min-np", 4, "--hosts", "127.0.0.1:2,me@127.0.0.2:2", "--max-restarts", 0]
    job = Job(tmp_path, launch, fails=[0], least=4, timeout=1.0)
    assert job.exit_code != 0, job.said
    assert job.sizes() == [4]
    assert "3 workers are left and 4 are needed; no others joined within 1 s" in job.said


@pytest.mark.slow  # `test_run_elastic.py` has a quick one
@pytest.mark.parametrize(("restarts", "completes"), [(1, False), (2, True)])
def test_restarts_have_a_bound(tmp_path: Path, restarts: int, completes: bool) -> None:
    launch = ["-np", 4, "--min-np", 2, "--max-restarts", restarts]
    # Two ranks fail, and the job goes on only with both replaced.
    job = Job(tmp_path, launch, fails=[0, 1], least=4, timeout=60.0 if completes else 8.0)
    assert (job.exit_code == 0) == completes, job.said
    assert job.sizes() == ([4, 4, 4] if completes else [4])
