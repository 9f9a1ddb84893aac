"""Forks of a rank, as pools of data loaders make them, do not disturb it or hide its end."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

import gradring
from gradring import cli, errors
from gradring.testing import run_ranks

LIVES_S = 20
"""How long a fork lives at most: longer than silence takes to be noticed."""


def be_killed_with_a_child(directory: str, transport: str) -> None:
    reported = Path(directory, "reported")
    with gradring.init(transport=transport) as comm:
        comm.barrier()
        if comm.rank == 1:
            if os.fork() == 0:
                os.setsid()  # or it would be ended with the rank's process group
                deadline = time.monotonic() + LIVES_S
                while not reported.exists() and time.monotonic() < deadline:
                    time.sleep(0.1)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            for _ in range(2):
                comm.barrier()
        finally:
            reported.touch()


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_killed_rank_is_noticed_at_once_though_a_fork_of_it_lives(
    tmp_path: Path, transport: str
) -> None:
    survivor, _ = run_ranks(be_killed_with_a_child, 2, str(tmp_path), transport, check=False)
    assert isinstance(survivor.exception, errors.PeerLostError), survivor
    assert survivor.exception.rank == 1
    assert "its process has ended" in str(survivor.exception)


PROGRAM = """
import gc, os, sys, warnings, numpy as np, gradring
from gradring import errors

# From Python 3.12 on, of every fork of a process with threads.
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
with gradring.init() as comm:
    comm.all_reduce(np.ones(4))
    child = os.fork()
    if child == 0:
        try:
            comm.all_reduce(np.ones(4))
        except errors.GradringError as error:
            print("child:", error.rank, error, flush=True)
        {leaves}
    status = os.waitpid(child, 0)[1]
    print("status", status, "sum", comm.all_reduce(np.ones(4))[0])
"""


@pytest.mark.parametrize(
    "leaves", ["sys.exit()", "comm.close(); os._exit(0)", "del comm; gc.collect(); os._exit(0)"]
)
def test_a_fork_cannot_use_the_group_and_leaves_it_as_it_is(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], leaves: str
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(leaves=leaves))
    assert cli.main(["run", "-np", "2", "--", sys.executable, str(program)]) == 0
    said = capfd.readouterr()
    assert said.err == ""
    for rank in (0, 1):
        assert f"[{rank}] status 0 sum 2.0" in said.out
        assert f"[{rank}] child: {rank} all_reduce on rank {rank} on " in said.out
        assert "was forked from the one to which this communicator belongs" in said.out
