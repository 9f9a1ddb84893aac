"""Every cell of the elastic fault matrix, with real processes."""

from __future__ import annotations

import pytest
from _pytest.mark import ParameterSet

from elastic.drill import drill
from elastic.matrix import OF_HOSTS, QUICK, Cell, cells
from faults.matrix import ROWS
from gradring.testing.network import why_unavailable


def marked(cell: Cell) -> ParameterSet:
    """The cell, for `make test-all` only unless it is a quick one."""
    marks = [] if cell.name in QUICK else [pytest.mark.slow]
    if cell.fault in OF_HOSTS and why_unavailable() is not None:
        marks.append(pytest.mark.skip(reason="needs network namespaces"))
    return pytest.param(cell, id=cell.name, marks=marks)


@pytest.mark.parametrize("cell", [marked(cell) for cell in cells()])
def test_an_elastic_job_goes_on_as_the_matrix_says(cell: Cell) -> None:
    result = drill(cell)
    assert not result.problems, "\n".join(result.problems)


def test_every_quick_cell_exists() -> None:
    assert {cell.name for cell in cells()} >= QUICK


def test_no_fault_and_no_phase_is_left_out() -> None:
    present = {(cell.fault, cell.phase) for cell in cells()}
    assert present >= {(row.fault, phase) for row in ROWS for phase in row.phases}
