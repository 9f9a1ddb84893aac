"""Disks, names, clocks and what the doctor says, where each machine has its own."""

from __future__ import annotations

import re
import sys

import pytest

from gradring import __version__
from machines.jobs import JOB_S, PROGRAMS, ended, started
from machines.machine import HOST, Laboratory, Machine, kernels

pytestmark = pytest.mark.timeout(4 * JOB_S)


def test_a_full_disk_of_one_machine_is_named_on_all_ranks(
    lab: Laboratory, machines: dict[int, Machine]
) -> None:
    machines[1].shell("mkdir -p /small; mountpoint -q /small || mount -t tmpfs -o size=4m s /small")
    hosts = f"{machines[1].address}:1,{HOST}:1"
    program = [sys.executable, PROGRAMS / "commits.py", "/small/commits"]
    job = ended(lab, lab.run_command(hosts, *program))
    said = job.said()
    assert sorted(said) == [0, 1], job.output
    for each in said.values():
        assert each["type"] == "SaveError" and each["rank"] == 0
        assert "rank 0 on machine1" in each["text"] and "/small/commits" in each["text"]
        assert "No space left on device" in each["text"]


def test_a_full_disk_for_logs_is_named_and_ends_no_rank(
    lab: Laboratory, machines: dict[int, Machine]
) -> None:
    machines[2].shell("mkdir -p /tiny; mountpoint -q /tiny || mount -t tmpfs -o size=64k s /tiny")
    program = "print('x' * 200_000, 'end', flush=True)"
    words = ["-m", "gradring", "run", "-np", 2, "--log-dir", "/tiny/logs", "--"]
    said = machines[2].run(
        sys.executable, *words, sys.executable, "-c", program, timeout_s=JOB_S, check=False
    )
    assert "No space left on device" in said and "/tiny/logs" in said and "machine2" in said
    assert len(re.findall(r"x end$", said, re.MULTILINE)) == 2


@pytest.mark.parametrize(
    ("elsewhere", "what"), [(HOST, "refused"), ("10.77.0.99", "No route to host")]
)
def test_a_name_that_resolves_to_another_host_is_named_with_its_address(
    elsewhere: str, what: str, lab: Laboratory, machines: dict[int, Machine]
) -> None:
    first, second = machines[1], machines[2]
    first.shell(f"sed -i /leader/d /etc/hosts; echo {first.address} leader >> /etc/hosts")
    second.shell(f"sed -i /leader/d /etc/hosts; echo {elsewhere} leader >> /etc/hosts")
    place = {"GRADRING_WORLD_SIZE": "2", "GRADRING_RENDEZVOUS": "leader:29500"}
    place["GRADRING_TOKEN"] = "of this job"
    program = [sys.executable, PROGRAMS / "steps.py", "40"]
    zero = first.command(*program, environ={"GRADRING_RANK": "0", **place})
    one = second.command(*program, environ={"GRADRING_RANK": "1", **place})
    with started(lab, zero) as listening, started(lab, one) as asking:
        assert asking.end() == 1 and listening.end() == 1
    said = asking.said()[0]
    assert said["type"] == "RendezvousError" and said["rank"] == 0
    text = rf"cannot reach it at leader:29500: .*{what}.*; here the name stands for {elsewhere} "
    assert re.search(text, said["text"]), said["text"]
    assert "rank 1 of 2 did not join rank 0 at leader:29500" in listening.said()[0]["text"]


def test_the_doctor_measures_every_pair_and_says_what_differs(
    lab: Laboratory, machines: dict[int, Machine]
) -> None:
    hosts = ",".join(f"{machine.address}:1" for machine in machines.values())
    command = lab.run_command(hosts, sys.executable, "-m", "gradring", "doctor")
    with started(lab, command) as job:
        code = job.end()
    for rank, machine in enumerate(machines.values()):
        line = f"rank {rank} on machine{machine.number}, {machine.address} (eth0), tcp, "
        kernel = machine.hardware.kernel or kernels()[-1]
        versions = f"gradring {__version__}, .* kernel {re.escape(kernel)}, "
        assert re.search(f"{re.escape(line)}.*{versions}", job.output), job.output
    rows = re.findall(r"^\[0\] (\d-\d) +\d+ us +[\d.]+ GB/s +(\S+) (\w+)$", job.output, re.M)
    assert [pair for pair, *_ in rows] == ["0-1", "0-2", "1-2"], job.output
    far = [pair for pair, time, unit in rows if time.startswith("-2,") and unit == "days"]
    named = re.findall(r"the clocks of ranks (\S+) are -2,\d{3} days apart", job.output)
    assert far == named == ["0-2", "1-2"] and code == 1, job.output


def test_the_doctor_says_which_machine_cannot_be_reached(machines: dict[int, Machine]) -> None:
    doctor = [sys.executable, "-m", "gradring", "doctor"]
    addresses = ("machine2:22", "machine2:9", "10.77.0.99:22")
    said = machines[1].run(*doctor, *addresses, check=False)
    assert "machine2:22 (10.77.0.12): connected within " in said
    assert "machine2:22: something listens there, but it is no gradring rank" in said
    assert "10.77.0.12 refuses: no process listens at port 9 there" in said
    assert "10.77.0.99:22 (10.77.0.99): 10.77.0.99: No route to host" in said


def test_a_small_model_trains_on_two_machines_as_one(
    lab: Laboratory, machines: dict[int, Machine]
) -> None:
    hosts = f"{machines[1].address}:1,{machines[2].address}:1"
    command = lab.run_command(hosts, "--with-strategy", PROGRAMS / "train.py")
    job = ended(lab, command, 3 * JOB_S)  # TensorFlow's import alone takes minutes
    found = re.findall(r"\[(\d)\] weights (\S+) (\S+)", job.output)
    assert sorted(rank for rank, *_ in found) == ["0", "1"], job.output
    assert len({weights for _, weights, _ in found}) == 1
