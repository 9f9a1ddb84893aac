"""TLS between machines whose clocks are years apart."""

from __future__ import annotations

import re
import sys

import pytest

from machines.jobs import JOB_S, PROGRAMS, ended, started
from machines.machine import HOST, Laboratory, Machine
from support.certificates import DAY, NOW, Authority, Certificate

pytestmark = pytest.mark.timeout(4 * JOB_S)

#: Rank 1 is where it is 2020.
HOSTS = f"{HOST}:1,10.77.0.13:1"


def certificate(lab: Laboratory, days: int) -> Certificate:
    """For all machines, valid so many days before and after now."""
    directory = lab.new_file("certificates")
    directory.mkdir()
    addresses = [HOST, *(f"10.77.0.1{number}" for number in range(1, 4))]
    return Authority(directory, validity=days * DAY).certify("rank", *addresses)


def test_a_clock_that_makes_a_certificate_invalid_is_named_on_both_sides(
    lab: Laboratory, machines: dict[int, Machine]
) -> None:
    command = lab.run_command(HOSTS, sys.executable, PROGRAMS / "steps.py", 60)
    with started(lab, command, **certificate(lab, 1).variables()) as job:
        assert job.end() == 1
    said = job.said()[1]
    begins = f"{NOW - DAY:%Y-%m-%d %H:%M} UTC"
    reason = f"not valid yet: it is valid from {begins}, and the clock here shows 2020-01-01 "
    assert said["type"] == "AuthenticationError" and reason in said["text"]
    turned_away = "rank 0 on .* turned away 10.77.0.13: it does not accept this rank's certificate"
    assert re.search(f"{turned_away}.* must be valid now by the other's clock", job.output)


def test_a_certificate_that_is_valid_by_both_clocks_serves(
    lab: Laboratory, machines: dict[int, Machine]
) -> None:
    years = certificate(lab, 3650)
    command = lab.run_command(HOSTS, sys.executable, PROGRAMS / "report.py")
    said = ended(lab, command, **years.variables()).said()
    assert said[0]["year"] - said[1]["year"] >= 5
    assert said[0]["large"] == said[1]["large"]
