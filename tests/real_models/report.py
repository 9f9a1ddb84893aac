"""``python -m real_models.report``: trains the grid and prints it as a Markdown table.

The cells are those of the tests, and so is the judgement.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence

from real_models.grid import QUICK, cells
from real_models.run import Result, run


def main(arguments: Sequence[str]) -> int:
    """Prints the table; returns 1 if a cell went wrong."""
    parser = argparse.ArgumentParser(prog="python -m real_models.report", description=__doc__)
    parser.add_argument("--only", default="", help="only cells with this text in their names")
    parser.add_argument("--quick", action="store_true", help="only the cells of `make test`")
    given = parser.parse_args(arguments)
    chosen = [cell for cell in (QUICK if given.quick else cells()) if given.only in cell.name]
    results = run(chosen, tell)
    print(table(results))
    wrong = [result for result in results if result.problems]
    print(f"\n{len(results) - len(wrong)} of {len(results)} trainings went as they must.")
    return 1 if wrong else 0


def tell(result: Result) -> None:
    """Says on stderr how a cell went."""
    print("WRONG" if result.problems else "right", result.cell.name, file=sys.stderr)
    for problem in result.problems:
        print(problem, file=sys.stderr)
    sys.stderr.flush()


def table(results: Sequence[Result]) -> str:
    """One line per model; in how many trainings it is as it must be, and the worst distances."""
    heads = ["model", "parameters", "ways", "trained, equal bits", "float64", "float32", "16 bits"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for model in dict.fromkeys(result.cell.model for result in results):
        lines.append(_line(model, [result for result in results if result.cell.model == model]))
    return "\n".join(lines)


def _line(model: str, results: Sequence[Result]) -> str:
    right = [result for result in results if not result.problems]
    parameters = max((result.ranks[0].parameters for result in results if result.ranks), default=0)
    by_precision = {
        policy: _worst(result for result in right if policy in result.cell.policy)
        for policy in ("float64", "float32", "mixed")
    }
    parts = [
        model,
        f"{parameters / 1e6:.2g} M",
        str(len({result.cell.way for result in results})),
        f"{len(right)} of {len(results)}",
        *by_precision.values(),
    ]
    return f"| {' | '.join(parts)} |"


def _worst(results: Iterable[Result]) -> str:
    """The largest distance from one process, and beside it what rounding explains."""
    found = [(r.ranks[0].distance, r.ranks[0].tolerance) for r in results]
    if not found:
        return ""
    distance, tolerance = max(found)
    return f"{distance:.0e} of {tolerance:.0e}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
