"""The program of the quick start runs with other numbers of ranks than the page shows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from documents import programs


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_numpy_program_runs_with_any_number_of_ranks(tmp_path: Path, ranks: int) -> None:
    tmp_path.joinpath("sum.py").write_text(programs()["sum.py"])
    done = subprocess.run(
        [sys.executable, "-m", "gradring", "run", "-np", str(ranks), "sum.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    mean = (ranks - 1) / 2
    assert sorted(done.stdout.splitlines()) == [
        f"[{rank}] {rank} {ranks} {mean}" for rank in range(ranks)
    ]
