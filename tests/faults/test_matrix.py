"""Every cell of the fault matrix, with real processes."""

from __future__ import annotations

import pytest
from _pytest.mark import ParameterSet

from faults.drill import drill
from faults.matrix import QUICK, Cell, cells


def marked(cell: Cell) -> ParameterSet:
    """The cell, for `make test-all` only unless it is a quick one."""
    slow = () if cell.name in QUICK else (pytest.mark.slow,)
    return pytest.param(cell, id=cell.name, marks=slow)


@pytest.mark.parametrize("cell", [marked(cell) for cell in cells()])
def test_survivors_see_what_the_matrix_says(cell: Cell) -> None:
    result = drill(cell)
    assert not result.problems, "\n".join(result.problems)


def test_every_quick_cell_exists() -> None:
    assert {cell.name for cell in cells()} >= QUICK
