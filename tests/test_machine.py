"""Load of the machine by other programs, and what of it a process may use."""

import math
from pathlib import Path

import pytest

from gradring.machine.resources import Usage, busy_s, quota, share_of_others

STAT = "cpu  100 20 30 4000 500 6 7 8 90 10\ncpu0 1 2 3 4 5 6 7 8 9 10\nintr 0\n"


def test_busy_time_leaves_out_idling_and_counts_guests_once() -> None:
    assert busy_s(STAT, ticks_per_s=100) == pytest.approx(1.71)


def test_the_share_of_others_leaves_out_our_own_processes() -> None:
    before = Usage(machine_s=100.0, children_s=1.0, moment_s=50.0)
    after = Usage(machine_s=118.0, children_s=14.0, moment_s=60.0)
    assert share_of_others(before, after, cores=2) == pytest.approx(0.25)


def test_the_share_of_others_is_never_negative() -> None:
    usage = Usage.now()
    assert share_of_others(usage, Usage.now(), cores=1) >= 0.0


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 0.5),
        ("0::/\n", {"cpu.max": "max 100000\n"}, math.inf),
        ("0::/a/b\n", {"a/cpu.max": "150000 100000", "a/b/cpu.max": "max 100000"}, 1.5),
        ("0::/known/outside\n", {"cpu.max": "200000 100000"}, 2.0),
        (
            "3:memory:/a\n2:cpu,cpuacct:/a\n0::/\n",
            {"cpu,cpuacct/a/cpu.cfs_quota_us": "25000", "cpu,cpuacct/a/cpu.cfs_period_us": "50000"},
            0.5,
        ),
        ("2:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "50000"}, math.inf),
        ("", {}, math.inf),
    ],
)
def test_a_quota_of_cores_is_the_lowest_of_all_groups(
    tmp_path: Path, own: str, files: dict[str, str], cores: float
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert quota(own, tmp_path) == cores
