"""Ranks that run different versions of Python and packages: rank 0 says so, once."""

from __future__ import annotations

import logging
import os

import numpy as np
import pytest

import gradring
from gradring.machine import versions
from gradring.testing import run_ranks


def warned(numpy_of_rank: dict[int, str]) -> list[str]:
    """What this rank logs while it joins, with another version of numpy where one is given."""
    of_rank = numpy_of_rank.get(int(os.environ["GRADRING_RANK"]), np.__version__)
    vars(np)["__version__"] = of_rank
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logging.getLogger("gradring").addHandler(Keep())
    with gradring.init() as comm, comm.split(0):
        return said


def test_a_version_that_differs_is_one_line_of_rank_0() -> None:
    (line,), *others = run_ranks(warned, 3, {0: "2.4.6", 1: "2.4.6", 2: "1.26.4"})
    assert line == (
        "ranks run different versions, which may compute differently: numpy 2.4.6 on rank 0, "
        "1.26.4 on rank 2; install the same on all hosts"
    )
    assert others == [[], []]


def test_equal_versions_are_no_line() -> None:
    assert run_ranks(warned, 2, {}) == [[], []]


@pytest.mark.parametrize(
    ("of_ranks", "expected"),
    [
        (["Python 3.11.7, numpy 2.4.6"] * 2, []),
        (["Python 3.11.7", "Python 3.12.1"], ["Python 3.11.7 on rank 0, 3.12.1 on rank 1"]),
        (["numpy 1, keras 3", "numpy 2", "numpy 1, keras 4"],
         ["numpy 1 on rank 0, 2 on rank 1", "keras 3 on rank 0, 4 on rank 2"]),
        (["numpy 2", "", "numpy 2"], []),
    ],
)  # fmt: skip
def test_a_package_that_a_rank_has_not_loaded_is_no_difference(
    of_ranks: list[str], expected: list[str]
) -> None:
    assert versions.differences(of_ranks) == expected


def test_what_a_process_has_loaded_is_told_without_an_import() -> None:
    assert f"numpy {np.__version__}" in versions.loaded()
    assert len(versions.loaded()) <= 200  # as long as a roster of all ranks has room for
