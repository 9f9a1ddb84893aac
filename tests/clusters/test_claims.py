"""A process that a rank has started is no rank, until that one has left the group."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradring
from gradring.clusters import Cluster, claims
from gradring.errors import ConfigError
from gradring.testing import run_ranks
from gradring.tools import cli

JOIN = """
import gradring
with gradring.init() as comm:
    print(comm.rank, comm.world_size)
"""


def refused() -> str:
    try:
        gradring.init()
    except ConfigError as error:
        return str(error)
    return "not refused"


def tell(queue: Any) -> None:
    queue.put(refused())


def start_children() -> tuple[str, str, list[str]]:
    """What a child script, and one of multiprocessing, are told; and what comes after the end."""
    command = [sys.executable, "-c", JOIN]
    with gradring.init() as comm:
        inside = subprocess.run(command, capture_output=True, text=True, check=False)
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        process = context.Process(target=tell, args=(queue,))
        process.start()
        spawned = queue.get(timeout=60)
        process.join()
        comm.all_reduce(np.ones(1))  # the group is as it was
        assert str(os.getpid()) in os.environ[claims.CLAIMS]
    assert claims.CLAIMS not in os.environ
    after = subprocess.run(command, capture_output=True, text=True, check=False)
    return inside.stderr.splitlines()[-1], spawned, after.stdout.split()


def test_a_child_of_a_rank_is_refused_while_that_is_in_the_group() -> None:
    for rank, (script, spawned, after) in enumerate(run_ranks(start_children, 2)):
        for told in (script, spawned):
            assert f"rank {rank} of the group at" in told, told
            assert "which has started process" in told, told
        assert after == [str(rank), "2"]


def test_wrappers_and_launchers_around_a_program_claim_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "train.py"
    program.write_text(JOIN)
    inner = f"import subprocess, sys; subprocess.run([sys.executable, {str(program)!r}])"
    for command in (
        ["bash", "-c", f"{sys.executable} {program}; true"],
        ["env", sys.executable, "-m", "pdb", "-c", "continue", str(program)],
        [sys.executable, "-c", inner],
    ):
        assert cli.main(["run", "-np", "2", "--", *command]) == 0
        assert "[0] 0 2" in capfd.readouterr().out, command


def test_a_job_inside_a_rank_is_a_group_of_its_own() -> None:
    for told in run_ranks(start_a_job, 1):
        assert told == ["[0] 0 2", "[1] 1 2"]


def start_a_job() -> list[str]:
    claims.claim(Cluster(0, 2, "127.0.0.1:1", None, "arguments", "in a test"))
    command = [
        sys.executable,
        "-m",
        "gradring",
        "run",
        "-np",
        "2",
        "--",
        sys.executable,
        "-c",
        JOIN,
    ]
    return sorted(subprocess.run(command, capture_output=True, text=True).stdout.splitlines())


def test_the_claim_of_a_process_that_has_ended_is_none() -> None:
    cluster = Cluster(0, 2, "127.0.0.1:1", None, "arguments", "in a test")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    start = claims._start_of(str(ended.pid))
    ended.wait()
    environ = {claims.CLAIMS: f"{ended.pid}:{start}:0:127.0.0.1:1"}
    assert claims.holder(cluster, environ) is None
    # Another process has its number now.
    environ = {claims.CLAIMS: f"{os.getppid()}:1:0:127.0.0.1:1"}
    assert claims.holder(cluster, environ) is None
    environ = {claims.CLAIMS: f"{os.getppid()}:{claims._start_of(str(os.getppid()))}:0:127.0.0.1:1"}
    assert claims.holder(cluster, environ) == os.getppid()
    assert claims.holder(Cluster(1, 2, "127.0.0.1:1", None, "", ""), environ) is None
