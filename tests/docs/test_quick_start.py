"""The program of the quick start runs with other numbers of ranks than the page shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.commands import succeeded
from support.documents import programs


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_numpy_program_runs_with_any_number_of_ranks(tmp_path: Path, ranks: int) -> None:
    tmp_path.joinpath("sum.py").write_text(programs()["sum.py"])
    done = succeeded("run", "-np", ranks, "sum.py", cwd=tmp_path, timeout=60)
    mean = (ranks - 1) / 2
    assert sorted(done.stdout.splitlines()) == [
        f"[{rank}] {rank} {ranks} {mean}" for rank in range(ranks)
    ]
