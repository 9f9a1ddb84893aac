"""Versions of other packages: what says which are supported says the same."""

from __future__ import annotations

import re

import pytest
from packaging.requirements import Requirement

from gradring.machine.packages import REQUIREMENTS
from gradring.tensorflow.seams.tried_versions import TRIED
from support import version_table
from support.documents import ROOT
from support.version_table import Result
from support.versions import BOUNDS, MATRIX

PROJECT = (ROOT / "pyproject.toml").read_text()
PAGE = (ROOT / "docs" / "compatibility.md").read_text()


def after(version: str) -> str:
    """The first minor version that was not tried."""
    major, minor = version.split(".")[:2]
    return f"{major}.{int(minor) + 1}"


def test_the_package_knows_the_versions_that_were_tried() -> None:
    for package, (lowest, highest) in TRIED.items():
        assert (lowest, highest) == (BOUNDS[package].lowest, BOUNDS[package].highest)
    assert set(TRIED) == {"tensorflow", "keras", "tf_keras"}


def test_the_project_asks_for_these() -> None:
    of = BOUNDS["tensorflow"]
    bounds = f">={of.lowest},<{after(of.highest)}"
    asked = re.findall(r'"tensorflow(?:-cpu)?([<>=][^ "]*)', PROJECT)
    assert asked == [bounds] * 3
    assert REQUIREMENTS["tensorflow"].endswith(bounds)
    assert f'dependencies = ["numpy>={BOUNDS["numpy"].lowest}"]' in PROJECT
    assert f'requires-python = ">={BOUNDS["python"].lowest}"' in PROJECT
    minors = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)
    assert (minors[0], minors[-1]) == (BOUNDS["python"].lowest, BOUNDS["python"].highest)
    # Keras 2 is installed without its bounds.
    assert f"tf_keras<{after(BOUNDS['tf_keras'].highest)}" in (ROOT / "Makefile").read_text()


def test_the_page_says_these() -> None:
    of = BOUNDS["tensorflow"]
    lowest, highest = of.lowest, of.highest.rpartition(".")[0]
    assert f"Python {BOUNDS['python'].lowest} or newer" in PAGE
    assert f"TensorFlow {lowest} to {highest}" in PAGE
    assert f"| `tensorflow` or `tensorflow-cpu`, {lowest} to {highest} |" in PAGE


def test_the_highest_and_the_lowest_are_columns_of_the_table() -> None:
    for package in ("tensorflow", "keras", "tf_keras"):
        versions = [getattr(column, package) for column in MATRIX]
        assert BOUNDS[package].highest in versions
        lowest = BOUNDS[package].lowest
        assert any(version.startswith(f"{lowest}.") for version in versions)
    last = MATRIX[-1]
    for package in ("tensorflow", "keras", "tf_keras"):
        assert getattr(last, package) == BOUNDS[package].highest


@pytest.mark.parametrize("package", ["tensorflow", "numpy", "tf_keras"])
def test_what_comes_next_may_be_a_candidate(package: str) -> None:
    """pip takes no version that is not final, unless it is asked for one."""
    highest = BOUNDS[package].highest
    asked = Requirement(BOUNDS[package].next).specifier
    assert asked.prereleases
    assert asked.contains(highest) and asked.contains(f"{after(highest)}.0rc0")


def test_the_table_of_the_page_is_that_of_the_records() -> None:
    assert version_table.page(PAGE) == PAGE
    assert version_table.recorded()


def test_the_table_has_each_run_under_its_versions() -> None:
    records = version_table.recorded()
    table = version_table.table_of(records)
    for record in records:
        assert str(record.versions) in table
        assert set(record.cells) <= set(version_table.FEATURES)


RESULTS = [
    Result("tests.tensorflow.test_a::test_x[fit-adam]", "passed"),
    Result("tests.tensorflow.test_a::test_y", "skipped", "needs Keras 3.10"),
    Result("tests.tensorflow.test_names::test_z", "failed"),
    Result("tests.tensorflow.test_names::test_w", "passed"),
]


def test_a_cell_counts_the_tests_of_a_feature() -> None:
    assert version_table.cells_of(RESULTS) == {
        "`fit`: SGD, Adam, AdamW": "1 passed",
        "errors, names": "**1 failed**; 1 passed",
        "bucketing and all else": "1: needs Keras 3.10",
    }
