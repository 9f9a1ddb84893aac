"""The demo's trouble: a slow rank and a killed one are named."""

from __future__ import annotations

import io
import re
import warnings
from pathlib import Path

import pytest
from made_up import Printed

from gradring.tools.demo import launched, trouble


@pytest.mark.slow
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


TOLD = """\
[1] generation 1: rank 1 of 4 trains on after step 0 at 9.000 s
[0] step 1 ended at 10.000 s
[1] killed after step 57 at 20.000 s
[0] generation 2: rank 0 of 3 trains on after step 50 at 20.500 s
[0] step 51 ended at 21.500 s
[0] generation 3: rank 0 of 4 trains on after step 90 at 25.000 s
""" + "".join(f"[{rank}] 400 steps: test accuracy 0.989, weights 5e\n" for rank in range(4))


def test_what_is_told_of_a_killed_rank_is_read_from_the_ranks_lines() -> None:
    survived, story = trouble.outcome(TOLD, 0, 1)
    assert survived
    assert "killed after step 57. 0.5 s later the others had formed a new group" in story
    assert "and 1.0 s later, with functions traced again, they had ended step 51" in story
    assert "7 steps were done again. Another process joined them in generation 3" in story


@pytest.mark.parametrize(
    ("changed", "instead", "exit_code", "problem"),
    [
        ("", "", 1, "did not come to its end"),
        ("ended at 21.5", "began at 21.5", 0, "did not come to its end"),
        ("step 51 ended", "step 41 ended", 0, "17 steps were done again"),
        ("[3] 400 steps: test accuracy 0.989, weights 5e", "", 0, "other weights, or not all"),
        ("[3] 400 steps: test accuracy 0.989, weights 5e", TOLD[-13:], 0, "not all"),
    ],
)
def test_a_job_that_did_not_survive_is_told_so(
    changed: str, instead: str, exit_code: int, problem: str
) -> None:
    survived, found = trouble.outcome(TOLD.replace(changed, instead), exit_code, 1)
    assert not survived and problem in found


@pytest.mark.parametrize(
    ("line", "exit_code", "said"),
    [
        ("[0] step 51 | 20 ms | slowest: rank 1 node-b +10 ms\n", 0, "Rank 1 was named after"),
        ("[0] Rank 1 on node-b is the slowest\n", 0, "Rank 1 was named after"),
        ("[0] step 51 | 20 ms | slowest: rank 0 node-a +10 ms\n", 1, "Rank 1 was not named"),
    ],
)
def test_a_line_of_the_training_names_the_slow_rank(
    line: str, exit_code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, output = Printed(line).instead_of(trouble, monkeypatch), io.StringIO()
    assert trouble.show_slow_rank(1, tmp_path, stream=output) == exit_code
    assert f"{line}\n{said}" in output.getvalue()
    ((workers, log_dir, options, launch),) = training.started
    assert (workers, log_dir, launch) == (2, tmp_path, ())
    assert options[2:] == ["--slow-rank", "1", "--slow-ms", "20"]


def test_the_lines_of_an_elastic_training_are_shown_with_the_story(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, output = Printed(TOLD).instead_of(trouble, monkeypatch), io.StringIO()
    assert trouble.show_killed_rank(1, tmp_path, stream=output) == 0
    assert f"{TOLD}\nRank 1 was killed after step 57." in output.getvalue()
    assert training.started == [(4, tmp_path, ["--kill", "1"], ["--min-np", "2"])]


def test_a_training_that_does_not_end_is_told_with_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trouble, "require_packages", lambda: None)
    monkeypatch.setattr(launched, "DEADLINE_S", 0.5)
    output = io.StringIO()
    assert trouble.show_killed_rank(1, tmp_path, stream=output) == 1
    assert output.getvalue().endswith(
        "The training has not ended within 0.5 s and is stopped.\n\n"
        "The training did not come to its end; the lines above say why.\n"
    )


def test_weights_become_arrays_without_a_warning() -> None:
    pytest.importorskip("tensorflow")
    pytest.importorskip("sklearn")
    from gradring.tools.demo import train

    variables = train.build_model().weights
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = train.arrays(variables)
    assert [array.shape for array in found] == [tuple(each.shape) for each in variables]


@pytest.mark.slow
def test_a_killed_rank_is_replaced_while_the_others_go_on(tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")
    pytest.importorskip("sklearn")
    output = io.StringIO()
    exit_code = trouble.show_killed_rank(1, tmp_path, stream=output)
    said = output.getvalue()
    assert exit_code == 0, said
    assert "gradring run: worker 1 on " in said
    assert said.count("generation 1: ") == 4
    assert "generation 2: rank 2 of 3 trains on after step 50" in said
    assert re.search(r"All 4 ranks have the same weights", said.splitlines()[-1])
