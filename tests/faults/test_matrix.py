"""Every cell of the fault matrix, with real processes."""

from __future__ import annotations

import re

import pytest

from faults.drill import drill
from faults.matrix import (
    FIRST_SEGMENT,
    HANDSHAKE,
    IDLE,
    MOVING,
    PHASES,
    QUICK,
    RENDEZVOUS,
    ROWS,
    SHUTDOWN,
    Cell,
    cells,
)
from support.chosen import marked
from support.documents import ROOT

SIMULATED_PHASES = {
    "Idle": (IDLE,),
    "FirstSegment": (FIRST_SEGMENT,),
    "Shutdown": (SHUTDOWN,),
    "MOVING": MOVING,
    "WORKING": (IDLE, *MOVING),
}
"""The phases by their names in the simulation."""
QUICK_CELLS = [cell for cell in cells() if cell.name in QUICK]


@pytest.mark.parametrize("cell", marked(cells(), QUICK_CELLS), ids=lambda cell: cell.name)
def test_survivors_see_what_the_matrix_says(cell: Cell) -> None:
    result = drill(cell)
    assert not result.problems, "\n".join(result.problems)


def test_every_fault_and_phase_has_a_quick_cell() -> None:
    assert {cell.name for cell in QUICK_CELLS} == QUICK
    assert {cell.phase for cell in QUICK_CELLS} == set(PHASES)
    assert {cell.fault for cell in QUICK_CELLS} == {row.fault for row in ROWS}


def test_the_simulation_has_every_row_of_a_group_that_has_formed() -> None:
    text = (ROOT / "rust" / "simulation" / "src" / "groups" / "facts.rs").read_text()
    errors = dict(re.findall(r'const (\w+): Option<&str> = Some\("(\w+)"\);', text))
    rows = re.findall(r'Row::new\(\s*"([^"]+)",\s*&?\[?(\w+)\]?,\s*(\w+),', text)
    simulated = {
        (fault, phase, errors.get(error))
        for fault, phases, error in rows
        for phase in SIMULATED_PHASES[phases]
    }
    formed = {(row.fault, phase, row.error) for row in ROWS for phase in row.phases}
    assert {row for row in formed if row[1] not in (RENDEZVOUS, HANDSHAKE)} <= simulated


def test_the_documentation_names_what_has_no_row() -> None:
    text = (ROOT / "docs" / "internals" / "failure.md").read_text()
    table = text.partition("| fault | phases without a row | why |\n")[2].partition("\n\n")[0]
    told = [line.split(" | ")[:2] for line in table.splitlines()[1:]]
    named = {(fault[2:], phase) for fault, phases in told for phase in phases.split(", ")}
    present = {(row.fault, phase) for row in ROWS for phase in row.phases}
    assert named == {(row.fault, phase) for row in ROWS for phase in PHASES} - present
