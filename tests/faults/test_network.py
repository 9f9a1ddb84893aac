"""Links that fail without a word, between simulated hosts."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import numpy as np

import gradring
from gradring import errors
from gradring.testing import run_ranks, simulated_hosts
from support.commands import command_line
from support.waiting import SOON_LOST, wait_until


def sum_over_hosts() -> tuple[str, float]:
    with gradring.init() as comm:
        x = np.full(1000, comm.rank + 1.0)
        comm.all_reduce(x)
        return comm.stats()["transport"], float(x[999])


def test_ranks_on_hosts_of_their_own_form_a_group() -> None:
    with simulated_hosts(3, rate="1gbit") as hosts:
        results = run_ranks(sum_over_hosts, 3, hosts=hosts)
    assert results == [("tcp", 6.0)] * 3


def test_memory_is_shared_inside_a_host_and_tcp_used_between_hosts() -> None:
    with simulated_hosts(2) as hosts:
        assert run_ranks(sum_over_hosts, 4, hosts=hosts) == [("shm+tcp", 10.0)] * 4


def join_over_shared_memory() -> None:
    gradring.init(transport="shm", timeout=20)


def test_shared_memory_between_hosts_is_refused_with_the_reason() -> None:
    with simulated_hosts(2) as hosts:
        outcomes = run_ranks(join_over_shared_memory, 2, hosts=hosts, check=False)
    for outcome in outcomes:
        assert isinstance(outcome.exception, errors.ConfigError), outcome
        assert "cannot share memory" in str(outcome.exception)


#: Stands for ssh: the command runs in the namespace whose name is in the file of the address.
SSH = """#!/bin/sh
while [ $# -gt 2 ]; do shift; done
exec ip netns exec "$(cat {places}/$1)" sh -c "$2"
"""
TRAIN = """
import gradring, numpy as np, pathlib
comm = gradring.init()
for step in range(10**9):
    comm.all_reduce(np.ones(1000), name="gradients")
    if step == 10:
        pathlib.Path({directory!r}, f"trains-{{comm.rank}}").touch()
"""


def test_the_report_names_the_host_whose_network_was_cut(tmp_path: Path) -> None:
    ssh, program = tmp_path / "bin" / "ssh", tmp_path / "train.py"
    ssh.parent.mkdir()
    ssh.write_text(SSH.format(places=tmp_path))
    ssh.chmod(0o755)
    program.write_text(TRAIN.format(directory=str(tmp_path)))
    soon = [word for name in SOON_LOST for word in ("-x", name)]
    with simulated_hosts(3) as hosts:
        for host in hosts:
            (tmp_path / host.address).write_text(host.name)
        with subprocess.Popen(
            command_line(
                "run", *soon, "--hosts", ",".join(f"{each.address}:1" for each in hosts), program
            ),
            env={**os.environ, **SOON_LOST, "PATH": f"{ssh.parent}:{os.environ['PATH']}"},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as job:
            try:
                wait_until(lambda: len([*tmp_path.glob("trains-*")]) == 3, "all ranks train")
                hosts[2].cut()
                _, told = job.communicate(timeout=120)
            finally:
                job.kill()
    assert job.returncode == 1
    report = rf"rank [01] on \S+ failed first .*, but rank 2 on {hosts[2].address} is to blame"
    assert re.search(report, told), told
