"""Machines that lose their power: nobody gets a FIN or an RST, and nothing more is written."""

from __future__ import annotations

import re
import sys
import time

import pytest

from machines.jobs import JOB_S, PROGRAMS, started
from machines.machine import HOST, Laboratory, Machine

pytestmark = pytest.mark.timeout(4 * JOB_S)

TWO = f"{HOST}:1,10.77.0.11:1,10.77.0.12:1"
#: Silence of a rank until it counts as lost, by itself. The limit is wide: machines are slow.
SILENCE_S, LIMIT_S = 10.0, 60.0
#: Updates between two snapshots of `programs/server.py`.
SNAPSHOT_EVERY = 3


def test_a_machine_that_is_gone_in_a_collective_is_named_by_all_others(
    lab: Laboratory, machines: dict[int, Machine]
) -> None:
    command = lab.run_command(TWO, sys.executable, PROGRAMS / "steps.py", JOB_S)
    with started(lab, command) as job:
        for rank in range(3):
            job.wait_for(rf"\[{rank}\] going")
        machines[2].cut_power()
        assert job.end() == 1
    said = job.said()
    assert sorted(said) == [0, 1], job.output
    for rank in (0, 1):
        assert said[rank]["type"] == "PeerLostError" and said[rank]["rank"] == 2
        assert said[rank]["host"] == "machine2" and "on machine2" in said[rank]["text"]
        assert SILENCE_S - 1 < said[rank]["after_s"] < LIMIT_S
        print(f"rank {rank} named machine2 after {said[rank]['after_s']:.1f} s")


def test_a_machine_that_is_gone_while_the_group_forms_is_named(
    lab: Laboratory, machines: dict[int, Machine]
) -> None:
    # Rank 1 has joined; rank 2 starts when the machine of rank 1 is gone.
    place = {"GRADRING_WORLD_SIZE": "3", "GRADRING_RENDEZVOUS": f"{HOST}:29500"}
    place["GRADRING_TOKEN"] = "of this job"
    program = [sys.executable, PROGRAMS / "steps.py", 150]
    with started(lab, lab.command(*program), GRADRING_RANK="0", **place) as zero:
        one = machines[1].command(*program, environ={"GRADRING_RANK": "1", **place})
        with started(lab, one):
            zero.wait_for("has waited .* for rank 2 of 3 to join")
            machines[1].cut_power()
        two = machines[2].command(*program, environ={"GRADRING_RANK": "2", **place})
        with started(lab, two) as last:
            assert [zero.end(), last.end()] == [1, 1]
    for job in (zero, last):
        assert "rank 1 on machine1" in job.said()[0]["text"], job.output


def test_an_elastic_job_goes_on_without_a_machine_that_is_gone_as_it_regroups(
    lab: Laboratory, machines: dict[int, Machine]
) -> None:
    hosts = f"{HOST}:3,{machines[1].address}:1,{machines[2].address}:1"
    program = [sys.executable, PROGRAMS / "elastic_job.py", "1", "4"]
    command = lab.run_command(hosts, "--min-np", 2, "--max-restarts", 0, *program)
    with started(lab, command) as job:
        machines[2].wait_until_dark(JOB_S)
        assert "power is cut: it regroups" in machines[2].console.read_text(errors="replace")
        began = time.monotonic()
        code = job.end()
        print(f"ended {time.monotonic() - began:.1f} s after the cut", job.output)
    found = re.findall(r"\[(\d+)\] ended (\d+) (\d+) \{(.*)\}", job.output)
    assert sorted(int(rank) for rank, *_ in found) == [0, 2, 3], job.output
    assert code == 0, job.output
    # Each of 40 steps added 2 in every group: none was lost, and none was done twice.
    assert {values for *_, values in found} == {"np.float64(80.0)"}
    assert {size for _, size, *_ in found} == {"3"}


def test_a_server_goes_on_from_a_whole_snapshot_after_a_cut_in_the_middle_of_one(
    lab: Laboratory, machines: dict[int, Machine]
) -> None:
    served = machines[1]
    address = f"{served.address}:2222"
    program = [sys.executable, PROGRAMS / "server.py", address]
    worker = lab.command(sys.executable, PROGRAMS / "worker.py", address)
    with started(lab, worker) as job:
        with started(lab, served.command(*program, "cut")):
            served.wait_until_dark(JOB_S)
        (moment,) = re.findall(r"power is cut: (.*)", served.console.read_text(errors="replace"))
        print(moment)
        assert re.match(r"\d+ bytes of a snapshot are written, [2-9] are whole", moment)
        served = lab.boot_all({1: served.hardware})[1]
        with started(lab, served.command(*program, "serve")) as server:
            assert [job.end(), server.end()] == [0, 0], job.output + server.output
    assert "go on from snapshot" in server.output
    said = job.said()[0]
    # Fewer than two snapshots' updates are given up, and none is applied twice.
    assert 0 < said["back"] <= 2 * SNAPSHOT_EVERY and said["wrong"] == []
