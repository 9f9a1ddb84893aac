"""``python -m faults.report``: runs the fault matrix and prints it as a Markdown table.

The cells are those of the tests, and so is the judgement. Several run at a time, because most of
them wait for a silence.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby

from faults.drill import Result, drill
from faults.matrix import BOTH, PHASES, Cell, cells

JOBS = 2
FAST_S = 0.01
"""Times below this are not told apart."""


def main(arguments: Sequence[str]) -> int:
    """Prints the table; returns 1 if a cell went wrong."""
    parser = argparse.ArgumentParser(prog="python -m faults.report", description=__doc__)
    parser.add_argument("--jobs", type=int, default=JOBS, help="cells at a time (default: 2)")
    parser.add_argument("--only", default="", help="only cells with this text in their names")
    given = parser.parse_args(arguments)
    chosen = [cell for cell in cells() if given.only in cell.name]
    with ThreadPoolExecutor(given.jobs) as pool:
        results = list(pool.map(told, chosen))
    print(table(results))
    wrong = [result for result in results if result.problems]
    for result in wrong:
        print(f"\n{result.cell.name}:\n" + "\n".join(result.problems), file=sys.stderr)
    print(f"\n{len(results) - len(wrong)} of {len(results)} cells went as they must.")
    return 1 if wrong else 0


def told(cell: Cell) -> Result:
    """Drills, and says so on stderr."""
    result = drill(cell)
    print("WRONG" if result.problems else "right", cell.name, file=sys.stderr, flush=True)
    return result


def table(results: Sequence[Result]) -> str:
    """One line per fault and phase; one column per transport and number of ranks."""
    columns = [(transport, size) for transport in BOTH for size in (2, 4)]
    heads = ["fault", "phase", "survivors get", *(f"{t}, {n} ranks" for t, n in columns)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    ordered = sorted(results, key=_place)
    for (fault, phase), group in groupby(ordered, lambda r: (r.cell.fault, r.cell.phase)):
        found = {(r.cell.transport, r.cell.world_size): r for r in group}
        error = next(iter(found.values())).cell.error
        shown = [_shown(found.get(column)) for column in columns]
        lines.append(f"| {fault} | {phase} | {error or 'no error'} | {' | '.join(shown)} |")
    return "\n".join(lines)


def _place(result: Result) -> tuple[int, int]:
    faults = list(dict.fromkeys(cell.fault for cell in cells()))
    return faults.index(result.cell.fault), PHASES.index(result.cell.phase)


def _shown(result: Result | None) -> str:
    if result is None:
        return ""
    if result.problems:
        return "**wrong**"
    return f"{result.noticed_s:.2g} s" if result.noticed_s >= FAST_S else f"< {FAST_S} s"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
