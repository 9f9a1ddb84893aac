"""Every cell of the elastic fault matrix, with real processes."""

from __future__ import annotations

import pytest

from elastic.drill import drill
from elastic.matrix import QUICK, Cell, cells
from faults.matrix import ROWS
from support.chosen import marked

QUICK_CELLS = [cell for cell in cells() if cell.name in QUICK]


@pytest.mark.parametrize("cell", marked(cells(), QUICK_CELLS), ids=lambda cell: cell.name)
def test_an_elastic_job_goes_on_as_the_matrix_says(cell: Cell) -> None:
    result = drill(cell)
    assert not result.problems, "\n".join(result.problems)


def test_every_quick_cell_exists() -> None:
    assert {cell.name for cell in cells()} >= QUICK


def test_no_fault_and_no_phase_is_left_out() -> None:
    present = {(cell.fault, cell.phase) for cell in cells()}
    assert present >= {(row.fault, phase) for row in ROWS for phase in row.phases}
