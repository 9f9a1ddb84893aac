"""The demo's results as text and as a picture."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from made_up import rank_result, results

from gradring.tools.demo import report


def test_the_table_has_a_row_per_process_whose_parts_add_up() -> None:
    header, first, _, third, _, last, *_ = report.table(results()).splitlines()
    percentiles = ["9.00", "12.50", "30.00", "5e" * 8]
    assert first.split() == [
        *("gradring", "0", "4,000", "9.00"),
        *("6.00", "1.00", "2.00"),
        *percentiles,
    ]
    assert third.split() == ["multi-worker-mirrored", "0", "2,000", "18.00", *"---", *percentiles]
    assert last.split()[:4] == ["single", "0", "9,000", "8.00"]
    assert first.index("5e5e") == third.index("5e5e") == header.index("SHA-256")


def test_every_column_is_explained() -> None:
    header, text = report.HEADER, report.table(results())
    for name in ("samples/s", "step ms", "compute", "communication", "waiting", "p50"):
        assert name in header
        assert f"\n  {name}" in text


def test_the_comparison_states_the_ratio_and_no_speed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    said = " ".join(report.comparison(results(), None).split())
    assert "takes 18.00 ms per step" in said
    assert "gradring 9.00 ms: a ratio of 2.0" in said
    assert "2 workers with one thread each train 0.89 times as many samples/s as one" in said
    assert "On this machine's 2 cores, this shows overhead, not scaling." in said


def test_a_missing_comparison_is_explained() -> None:
    said = report.comparison(results(mirrored=()), "it never ended")
    assert "no comparison with MultiWorkerMirroredStrategy: it never ended" in said
    assert said.count("MultiWorkerMirrored") == 1
    assert "comparison" not in report.comparison(results(mirrored=()), None)


@pytest.mark.parametrize("with_mirrored", [True, False])
def test_the_picture_is_drawn_with_and_without_the_comparison(
    tmp_path: Path, with_mirrored: bool
) -> None:
    pytest.importorskip("matplotlib")
    whole = results() if with_mirrored else results(mirrored=())
    assert report.draw(whole, tmp_path).stat().st_size > 10_000


def test_results_are_what_the_ranks_have_written(tmp_path: Path) -> None:
    written = [rank_result(rank) for rank in range(2)]
    for each in written:
        facts = {name: value for name, value in vars(each).items() if name != "weights"}
        (tmp_path / f"rank-{each.rank}.json").write_text(json.dumps(facts))
        np.savez(tmp_path / f"rank-{each.rank}.npz", *each.weights)
    for each, found in zip(written, report.read_ranks(tmp_path, 2), strict=True):
        assert (found.rank, found.step_ms) == (each.rank, 9.0)
        assert [weight.tolist() for weight in found.weights] == [
            weight.tolist() for weight in each.weights
        ]
