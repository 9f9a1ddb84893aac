"""The share of the machine that a process may use."""

import math
from pathlib import Path

import pytest

from gradring.machine.resources import quota


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
