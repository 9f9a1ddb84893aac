"""One group of machines that differ in kernel, processor, clock, packets and Python."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from gradring.testing import run_ranks, simulated_hosts
from machines.jobs import JOB_S, PROGRAMS, ended
from machines.machine import HOST, Laboratory, Machine, kernels
from support import bits

pytestmark = pytest.mark.timeout(4 * JOB_S)

ALL = f"{HOST}:1,10.77.0.11:1,10.77.0.12:1,10.77.0.13:1"
Report = dict[int, dict[str, Any]]
_reports: list[Report] = []


@pytest.fixture
def report(lab: Laboratory, machines: dict[int, Machine]) -> Report:
    """What the ranks of one job say, by rank: this host, and machines 1 to 3, over sshd."""
    if not _reports:
        command = lab.run_command(ALL, sys.executable, PROGRAMS / "report.py", "grid")
        _reports.append(ended(lab, command).said())
    return _reports[0]


def test_ranks_start_over_sshd_on_three_machines_and_get_equal_bits(report: Report) -> None:
    hosts = [report[rank]["host"] for rank in range(4)]
    assert hosts == [os.uname().nodename, "machine1", "machine2", "machine3"]
    assert len({each["large"] for each in report.values()}) == 1


def test_different_kernels_form_one_group(report: Report) -> None:
    found = [report[rank]["kernel"] for rank in range(4)]
    assert found == [os.uname().release, kernels()[-1], kernels()[0], kernels()[-1]]
    assert len(set(found)) >= 2


def test_every_dtype_and_op_has_the_same_bits_on_different_processors(report: Report) -> None:
    processors = [report[rank]["processor"] for rank in range(4)]
    assert "avx2" in processors[0] and processors[1:3] == [["avx2", "fma"], []]
    # They are also those of one processor.
    with simulated_hosts(4) as hosts:
        expected = run_ranks(bits.digests_of_a_process, 4, {}, hosts=hosts)
    assert [report[rank]["digests"] for rank in range(4)] == expected
    assert set(expected[0]) == set(bits.DTYPES) and len({str(one) for one in expected}) == 1


def test_a_token_is_proved_between_clocks_that_are_years_apart(report: Report) -> None:
    years = [report[rank]["year"] for rank in range(4)]
    assert years[0] - years[3] >= 5 and len(set(years[:3])) == 1
    assert all(each["has a token"] for each in report.values())


def test_a_machine_with_smaller_packets_takes_part_in_large_sums(
    report: Report, machines: dict[int, Machine]
) -> None:
    assert "mtu 1280" in machines[3].shell("ip link show eth0")
    assert "mtu 1500" in machines[1].shell("ip link show eth0")
    assert report[3]["large"] == report[0]["large"]


def test_different_pythons_form_one_group(
    lab: Laboratory, machines: dict[int, Machine], another_python: Path
) -> None:
    hosts = f"{HOST}:1,{machines[1].address}:1"
    # A script runs under the launcher's own interpreter here, and under `--python` elsewhere.
    job = ended(lab, lab.run_command(hosts, "--python", another_python, PROGRAMS / "report.py"))
    own, other = job.said()[0], job.said()[1]
    assert own["python"] != other["python"]
    assert own["large"] == other["large"]
    named = f"Python {own['python']} on rank 0, {other['python']} on rank 1"
    assert "ranks run different versions" in job.output and named in job.output
