"""Tests see a user's environment, whatever the machine sets."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from support.commands import completed
from support.documents import ROOT

#: Of machines on which the tests hid a defect, or went another way than a user's programs.
FOREIGN = {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1", "OPENBLAS_CORETYPE": "Haswell"}
FOREIGN["A_VARIABLE_THAT_NOBODY_KNOWS"] = "1"


def test_a_test_and_what_it_starts_see_no_other_variable() -> None:
    """Run by the next test as well, where there are some."""
    started = [sys.executable, "-c", "import os; print(*os.environ)"]
    found = subprocess.check_output(started, text=True).split()
    assert not FOREIGN.keys() & {*os.environ, *found}


@pytest.mark.parametrize("processes", ["0", "1"])
def test_variables_of_the_machine_are_left_behind(processes: str) -> None:
    name = test_a_test_and_what_it_starts_see_no_other_variable.__name__
    options = ["-q", "-p", "no:cacheprovider", "--numprocesses", processes]
    done = completed([sys.executable, "-m", "pytest", *options, f"{__file__}::{name}"], env=FOREIGN)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout


def test_make_test_leaves_them_behind() -> None:
    variables = {"CI": "true", "https_proxy": "http://127.0.0.1:1", "PIP_INDEX_URL": "mirror"}
    # In place of the make that runs the tests.
    done = completed(
        ["make", "test", "--assume-old=prerequisites", "MAKE=sh -c env"],
        env=FOREIGN | variables,
        cwd=ROOT,
    )
    found = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    assert not FOREIGN.keys() & found.keys(), done
    assert variables.items() <= found.items(), done
