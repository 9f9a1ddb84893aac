"""Failed tests that `make test` runs once more: what is green then, and what is not."""

from __future__ import annotations

import re
import shlex

import pytest

from support.documents import ROOT

pytest_plugins = ("pytester",)

(GIVEN,) = re.findall(r"^RERUN = (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
FIRST_TIME = """
from pathlib import Path
import pytest

def first_time(name):
    path = Path(name)
    if path.exists():
        return False
    path.touch()
    return True
"""
LATE = """
def test_late():
    if first_time("late"):
        raise TimeoutError("nobody came")
"""
WRONG = """
def test_wrong():
    if first_time("wrong"):
        raise RuntimeError("rank 1 said: AssertionError: 3 is not 2")
"""
CRASHED = """
def test_crashed():
    if first_time("crashed"):
        import os
        os._exit(1)
"""
ALWAYS = """
def test_always():
    raise TimeoutError("nobody comes")
"""
FIXTURE = """
@pytest.fixture(scope="module")
def rank():
    if first_time("fixture"):
        raise TimeoutError("nobody came")

def test_of_a_fixture(rank): pass
def test_of_the_same_fixture(rank): pass
"""
MANY = """
@pytest.mark.parametrize("name", "abcd")
def test_many(name):
    if first_time(name):
        raise TimeoutError("nobody came")
"""


@pytest.mark.parametrize(
    ("tests", "failed", "again"),
    [
        (
            (LATE, FIXTURE),
            0,
            ["RERUN test_0.py::test_late*", "RERUN test_1.py::test_of_a_fixture*"],
        ),
        ((LATE, WRONG), 1, ["RERUN test_0.py::test_late*"]),
        ((CRASHED,), 1, []),
        ((ALWAYS,), 1, ["RERUN test_0.py::test_always*"]),
        ((MANY,), 1, []),
    ],
    ids=["late", "a value", "a crash", "always", "many"],
)
def test_what_passes_the_second_time_is_green_unless_a_value_was_wrong(
    pytester: pytest.Pytester, tests: tuple[str, ...], failed: int, again: list[str]
) -> None:
    for number, test in enumerate(tests):
        (pytester.path / f"test_{number}.py").write_text(FIRST_TIME + test)
    result = pytester.runpytest_subprocess("-n", "1", "--dist", "loadfile", *shlex.split(GIVEN))
    assert result.ret == bool(failed)
    result.assert_outcomes(passed=result.parseoutcomes().get("passed", 0), failed=failed)
    result.stdout.fnmatch_lines_random(again)


def test_no_test_is_known_to_be_flaky() -> None:
    text = (ROOT / "tests" / "flaky.txt").read_text()
    assert text == "", "mend them, and empty the file"
