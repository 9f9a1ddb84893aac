"""Pairs of processes that go through cells.

TensorFlow takes seconds to start, so a pair goes on to the next cell; when one has failed, a new
pair takes the rest.
"""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gradring.launch.ranks import THREAD_VARIABLES
from gradring.testing import RankFailure, RankTimeout, run_ranks
from real_models.grid import SHARED_CORES, UNLIKE_PROCESSORS, WORLDS, Cell
from real_models.training import Trained

RANKS = 2
CELL_S = 900.0
"""For one cell; one that has not ended by then hangs."""
CELLS_OF_A_PAIR = 5
"""So that memory of one does not add up over all, and a run that is stopped loses little."""


@dataclass(frozen=True)
class Result:
    """What became of a cell."""

    cell: Cell
    ranks: list[Trained] = field(default_factory=list)
    error: str = ""

    @property
    def problems(self) -> list[str]:
        """What is wrong with it; empty if nothing is."""
        if self.error:
            return [self.error]
        first = self.ranks[0]
        found = []
        if any(rank.bits != first.bits for rank in self.ranks):
            found.append("the ranks have different weights")
        if not first.loss < float("inf"):
            found.append(f"the loss is {first.loss}")
        if not first.moved > 0:
            found.append("the training has moved no weight")
        # Where training amplifies roundings to its own size, only less than these proves anything.
        if not first.distance <= min(first.tolerance, first.moved / 10):
            found.append(
                f"{first.distance:.1e} from one process, where {first.tolerance:.1e} is explained; "
                f"the training moved the weights by {first.moved:.1e}"
            )
        return found


def run(cells: Sequence[Cell], tell: Callable[[Result], None] = lambda _: None) -> list[Result]:
    """Trains all cells; tells of each when its pair of processes has ended."""
    results: list[Result] = []
    for world in WORLDS:
        left = [cell for cell in cells if cell.world == world]
        while left:
            for result in _run_some(left[:CELLS_OF_A_PAIR], world):
                tell(result)
                results.append(result)
                left.remove(result.cell)
    return results


def _run_some(cells: Sequence[Cell], world: str) -> list[Result]:
    """Trains cells until one fails."""
    error = ""
    # Otherwise nothing is set: bits are compared as TensorFlow computes them by itself.
    with tempfile.TemporaryDirectory(prefix="real-models-") as directory:
        try:
            run_ranks(
                train_all,
                RANKS,
                list(cells),
                directory,
                timeout=CELL_S * len(cells),
                env=WORLDS[world],
            )
        except (RankFailure, RankTimeout) as failure:
            error = str(failure)
        results: list[Result] = []
        for index, cell in enumerate(cells):
            files = [_file(directory, index, rank) for rank in range(RANKS)]
            if not all(file.exists() for file in files):
                return [*results, Result(cell, error=error or "the ranks said nothing of it")]
            results.append(Result(cell, [pickle.loads(file.read_bytes()) for file in files]))
        return results


def train_all(cells: Sequence[Cell], directory: str) -> None:
    """On each rank: trains the cells, all of one world, and writes down what came out."""
    if cells[0].world != SHARED_CORES:
        for name in THREAD_VARIABLES:
            os.environ.pop(name, None)
    if cells[0].world == UNLIKE_PROCESSORS:
        os.environ["TF_ENABLE_ONEDNN_OPTS"] = os.environ["GRADRING_RANK"]

    import gradring
    from real_models.training import train

    with gradring.init() as comm:
        for index, cell in enumerate(cells):
            print(cell.name, file=sys.stderr, flush=True)
            trained = train(cell, comm)
            file = _file(directory, index, comm.rank)
            file.with_suffix(".new").write_bytes(pickle.dumps(trained))
            file.with_suffix(".new").rename(file)


def _file(directory: str, index: int, rank: int) -> Path:
    return Path(directory, f"{index}-{rank}.pickle")
