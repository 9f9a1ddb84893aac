"""The demo's trouble: a slow rank and a killed one are named."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest

from gradring.demo import trouble


def test_a_slow_rank_is_named(tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")
    pytest.importorskip("sklearn")
    output = io.StringIO()
    # The sleep is long against what a busy machine adds.
    trouble.SLOW_MS, before = 150, trouble.SLOW_MS
    try:
        exit_code = trouble.show_slow_rank(1, tmp_path, stream=output)
    finally:
        trouble.SLOW_MS = before
    assert exit_code == 0, output.getvalue()
    assert "Rank 1 on " in output.getvalue()
    left = {path.name for path in tmp_path.iterdir()}
    assert left >= {"rank-0.log", "rank-1.log", "steps.jsonl"}


def test_a_training_that_fails_at_the_start_leaves_nothing_to_explain(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(trouble, "require_packages", lambda: None)
    monkeypatch.setattr(trouble, "_train", lambda *_: (1, []))
    output = io.StringIO()
    assert trouble.show_killed_rank(1, tmp_path, stream=output) == 1
    assert "gradring explain" not in output.getvalue()
    assert output.getvalue().endswith("did not come to its end; the lines above say why.\n")


def test_a_killed_rank_is_named_and_the_restart_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("tensorflow")
    pytest.importorskip("sklearn")
    monkeypatch.setenv("GRADRING_FLIGHT_DIR", str(tmp_path / "elsewhere"))
    output = io.StringIO()
    exit_code = trouble.show_killed_rank(1, tmp_path, stream=output)
    said = output.getvalue()
    assert exit_code == 0, said
    assert "Rank 1 left no record" in said
    # The news may reach rank 0 while it computes.
    where = r"(Rank 0 has been in|rank 0 on \S+ is in no collective; it finished)"
    assert re.search(where + r" all_reduce\(\w+\) .*\(#\d+\)", said)
    assert "starts all ranks again in 1 s (restart 1/1)" in said
    assert "[0] resumes after step 100\n" in said
    last = said.splitlines()[-1]
    match = re.search(r"after step 100 and finished 200 steps: .* test accuracy (0\.\d+)", last)
    assert match is not None and float(match[1]) > 0.9, last
    assert [path.name for path in (tmp_path / "flight").iterdir()] == ["attempt-0"]
    assert "resumes after step 100\n" in (tmp_path / "rank-0.log").read_text()
