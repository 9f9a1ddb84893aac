"""``python -m faults.report``: runs the fault matrix and prints it as a Markdown table.

The cells are those of the tests, and so is the judgement. Several run at a time, because most of
them wait for a silence. With ``--elastic``, the matrix is that of elastic jobs.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import Any

import elastic.drill
import elastic.matrix
import faults.drill
import faults.matrix
from faults.drill import Result
from faults.matrix import BOTH, PHASES, Cell

JOBS = 2
FAST_S = 0.01
"""Times below this are not told apart."""


def main(arguments: Sequence[str]) -> int:
    """Prints the table; returns 1 if a cell went wrong."""
    parser = argparse.ArgumentParser(prog="python -m faults.report", description=__doc__)
    parser.add_argument("--jobs", type=int, default=JOBS, help="cells at a time (default: 2)")
    parser.add_argument("--only", default="", help="only cells with this text in their names")
    parser.add_argument("--elastic", action="store_true", help="what becomes of elastic jobs")
    given = parser.parse_args(arguments)
    drills = elastic.drill.drill if given.elastic else faults.drill.drill
    cells: Sequence[Cell] = elastic.matrix.cells() if given.elastic else faults.matrix.cells()
    chosen = [cell for cell in cells if given.only in cell.name]
    with ThreadPoolExecutor(given.jobs) as pool:
        results = list(pool.map(functools.partial(told, drills), chosen))
    print(table(results, "what follows" if given.elastic else "survivors get"))
    wrong = [result for result in results if result.problems]
    for result in wrong:
        print(f"\n{result.cell.name}:\n" + "\n".join(result.problems), file=sys.stderr)
    print(f"\n{len(results) - len(wrong)} of {len(results)} cells went as they must.")
    return 1 if wrong else 0


def told(drill: Callable[[Any], Result], cell: Cell) -> Result:
    """Drills, and says so on stderr."""
    result = drill(cell)
    print("WRONG" if result.problems else "right", cell.name, file=sys.stderr, flush=True)
    return result


def table(results: Sequence[Result], follows: str) -> str:
    """One line per fault, phase and what follows; one column per transport and number of ranks."""
    sizes = sorted({result.cell.world_size for result in results})
    columns = [(transport, size) for transport in BOTH for size in sizes]
    heads = ["fault", "phase", follows, *(f"{t}, {n} ranks" for t, n in columns)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    faults = list(dict.fromkeys(result.cell.fault for result in results))

    def line(result: Result) -> tuple[int, int, str]:
        cell = result.cell
        return faults.index(cell.fault), PHASES.index(cell.phase), cell.outcome

    for (fault, phase, outcome), group in groupby(sorted(results, key=line), line):
        found = {(r.cell.transport, r.cell.world_size): r for r in group}
        shown = [_shown(found.get(column)) for column in columns]
        lines.append(f"| {faults[fault]} | {PHASES[phase]} | {outcome} | {' | '.join(shown)} |")
    return "\n".join(lines)


def _shown(result: Result | None) -> str:
    if result is None:
        return ""
    if result.problems:
        return "**wrong**"
    return f"{result.noticed_s:.2g} s" if result.noticed_s >= FAST_S else f"< {FAST_S} s"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
