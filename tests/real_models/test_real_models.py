"""Every cell of the grid of real models, on two ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from real_models.catalogue import MODELS
from real_models.grid import BY_VERSION, NEEDED_GIB, QUICK, Cell, cells
from real_models.report import BEGIN, END, PAGE, recorded, sums
from real_models.run import CELL_S, Result, run
from real_models.ways import WAYS
from support.chosen import chosen, marked
from support.pages import written_between


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[Cell, Result]:
    """Of all cells that this run of pytest has: a pair of processes goes through many."""
    cells = chosen(request, "cell")
    is_short = {*cells} <= {*QUICK}
    return {result.cell: result for result in run([replace(c, is_short=is_short) for c in cells])}


@pytest.mark.timeout(CELL_S * len(cells()))
@pytest.mark.parametrize("cell", marked(cells(), QUICK), ids=lambda cell: cell.name)
def test_two_ranks_train_as_one_process(cell: Cell, results: dict[Cell, Result]) -> None:
    problems = results[cell].problems
    assert not problems, "\n".join(problems)


def test_every_architecture_of_keras_is_a_model() -> None:
    import keras

    assert {name for name in vars(keras.applications) if name[0].isupper()} <= set(MODELS)


def test_every_model_and_every_way_is_in_the_grid() -> None:
    assert {cell.model for cell in cells()} | set(NEEDED_GIB) == set(MODELS)
    assert {cell.way for cell in cells()} == set(WAYS)
    assert {*QUICK, *BY_VERSION} <= set(cells())


def test_the_page_shows_what_is_recorded() -> None:
    text = PAGE.read_text()
    assert text == written_between(text, BEGIN, END, sums(recorded())), (
        "run: real_models.report --page"
    )
