"""The page, the records and the programs belong together; `make ecosystem` runs the programs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ecosystem import run as running
from ecosystem.catalogue import ARCHITECTURES, PROGRAMS
from ecosystem.report import BEGIN, END, PAGE, number, records, tables
from ecosystem.run import RANKS, STRATEGY, Result, Run, compared
from support.pages import written_between


def test_the_page_shows_what_is_recorded() -> None:
    text = PAGE.read_text()
    assert text == written_between(text, BEGIN, END, tables()), "run: make ecosystem"


def test_every_file_is_a_program_and_every_program_has_a_name_of_its_own() -> None:
    files = {path.name for path in PROGRAMS[0].path.parent.glob("*.py")} - {"record.py"}
    assert {program.file for program in PROGRAMS} == files
    assert len({program.name for program in PROGRAMS}) == len(PROGRAMS)
    assert set(records()) <= {program.name for program in PROGRAMS}


def test_every_architecture_of_keras_is_a_program() -> None:
    import keras

    assert {name for name in vars(keras.applications) if name[0].isupper()} == set(ARCHITECTURES)


def noted(
    digest: str,
    last: float,
    losses: tuple[float, ...] = (1.0, 0.5),
    strategy: str = STRATEGY,
    ranks: int = RANKS,
) -> Run:
    found = {"digest": digest, "losses": list(losses), "epoch_s": 1.0, "strategy": strategy}
    found |= {"versions": {}, "more": {}, "ranks": ranks}
    return Run(found, [np.zeros(4)], [np.full(4, last)])


@pytest.mark.parametrize(
    ("ranks", "problem"),
    [
        ([noted("a", 1.0), noted("b", 1.0)], "the ranks have different weights"),
        ([noted("a", 1.01), noted("a", 1.01)], "the weights are 1e-02 from"),
        ([noted("a", float("nan"))] * 2, "the weights are nan from"),
        ([noted("a", 1.0, (1.0, 0.6))] * 2, "a loss is 2e-01 from"),
        ([noted("a", 1.0, (1.0,))] * 2, "a loss is nan from"),
        ([noted("a", 1.0), noted("a", 1.0, strategy="Default")], "a rank has lost the strategy"),
        ([noted("a", 1.0, ranks=1)] * 2, "a rank has no group of gradring"),
    ],
)
def test_what_is_wrong_is_named(ranks: list[Run], problem: str) -> None:
    result = compared(Result("x", {}, "", ""), PROGRAMS[0], noted("a", 1.0), ranks)
    assert [found for found in result.problems if found.startswith(problem)], result.problems


def test_what_is_right_has_no_problem() -> None:
    result = compared(Result("x", {}, "", ""), PROGRAMS[0], noted("a", 1.0), [noted("a", 1.0)] * 2)
    assert not result.problems
    assert (result.distance, result.loss, result.ratio) == (0.0, 0.0, 1.0)


def test_training_that_changes_nothing_is_a_problem() -> None:
    result = compared(Result("x", {}, "", ""), PROGRAMS[0], noted("a", 0.0), [noted("a", 0.0)] * 2)
    assert result.problems == ["training has changed nothing"]


@pytest.mark.parametrize(
    ("python", "timeout_s", "problem"),
    [
        ("echo no; exit 3", 600, "one process: exit code 3\nno"),
        ("exit 0", 600, "rank 0 has noted nothing"),
        ("exec sleep 600", 1, "one process: not done after 1 s\n"),
    ],
)
def test_a_program_that_fails_is_a_result_and_the_others_run(
    python: str, timeout_s: int, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a shell script in the place of Python, for which nothing has to be installed."""
    interpreter = tmp_path / "bin" / "python"
    interpreter.parent.mkdir()
    interpreter.write_text(f"#!/bin/sh\n{python}\n")
    interpreter.chmod(0o755)
    monkeypatch.setattr(running, "make_environment", lambda *_: tmp_path)
    monkeypatch.setattr(running, "TIMEOUT_S", timeout_s)
    result = running.run(PROGRAMS[0], tmp_path)
    assert result.problems == [problem]
    assert number(result.ratio, ".1f") == ""
