"""Of failed tests, those that pass in a fresh process and had no wrong value are called flaky."""

from __future__ import annotations

from pathlib import Path

import pytest

import reruns

pytest_plugins = ("pytester",)

CONFTEST = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(reruns.__file__).parent)!r})
from reruns import Reruns

def pytest_addoption(parser):
    parser.addoption("--rerun", action="store_true")

def pytest_configure(config):
    if config.getoption("--rerun") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Reruns(Path("record.txt").absolute()))
"""
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
    assert not first_time("wrong")
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
GOOD = """
def test_good(): pass
"""


@pytest.mark.parametrize(
    ("tests", "code", "said", "noted"),
    [
        ((LATE, GOOD, FIXTURE), 0, ["flaky: test_2.py::test_of_a_fixture"], 3),
        (
            (LATE, WRONG),
            1,
            ["passed the second time, but a value was wrong: test_1.py::test_wrong"],
            1,
        ),
        ((ALWAYS,), 1, ["failed again: test_0.py::test_always", "*nobody comes*"], 0),
        ((ALWAYS,) * 4, 1, ["not run again: tests of 4 files failed"], 0),
    ],
    ids=["late", "a value", "always", "many"],
)
def test_what_passes_the_second_time_is_flaky_unless_a_value_was_wrong(
    pytester: pytest.Pytester, tests: tuple[str, ...], code: int, said: list[str], noted: int
) -> None:
    pytester.makeconftest(CONFTEST)
    for number, test in enumerate(tests):
        (pytester.path / f"test_{number}.py").write_text(FIRST_TIME + test)
    result = pytester.runpytest_subprocess("-n", "1", "--rerun")
    assert result.ret == code
    result.stdout.fnmatch_lines(said)
    record = pytester.path / "record.txt"
    assert (record.read_text().count("flaky: ") if record.exists() else 0) == noted


def test_no_test_is_known_to_be_flaky() -> None:
    assert reruns.RECORD.read_text() == "", "mend them, and empty the file"
