"""``python -m real_models.report``: trains the grid and prints it as a Markdown table.

The cells are those of the tests, and so is the judgement. With ``--record`` a run goes on where the
last one has ended; ``--page`` prints the table of the newest record, and writes the sums of all
records into docs/internals/conformance.md.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from real_models.grid import BY_VERSION, cells
from real_models.record import DIRECTORY, Record
from real_models.run import Result, run
from support.pages import written_between

PAGE_COLUMNS = 120
PAGE = Path(__file__).parents[2] / "docs" / "internals" / "conformance.md"
BEGIN = "<!-- made by: python -m real_models.report --page -->\n"
END = "<!-- end of what python -m real_models.report makes -->\n"


def main(arguments: Sequence[str]) -> int:
    """Prints the table; returns 1 if a cell went wrong."""
    parser = argparse.ArgumentParser(prog="python -m real_models.report", description=__doc__)
    parser.add_argument("--only", default="", help="only cells with this text in their names")
    parser.add_argument("--by-version", action="store_true", help="only those of every version")
    parser.add_argument(
        "--record", action="store_true", help="keep what went right, and do not train that again"
    )
    parser.add_argument("--page", action="store_true", help="trains nothing; writes the page")
    given = parser.parse_args(arguments)
    if given.page:
        records = recorded()
        print(table(records[-1].results))
        PAGE.write_text(written_between(PAGE.read_text(), BEGIN, END, sums(records)))
        return 0
    of = BY_VERSION if given.by_version else cells()
    chosen = [cell for cell in of if given.only in cell.name]
    record = Record.here() if given.record else None
    known = [result for result in record.results if result.cell in chosen] if record else []
    done = {result.cell for result in known}

    def keep(result: Result) -> None:
        tell(result)
        if record:
            record.add(result)

    results = [*known, *run([cell for cell in chosen if cell not in done], keep)]
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


def recorded() -> list[Record]:
    """All records, that of the newest TensorFlow last."""
    records = [Record.read(path) for path in DIRECTORY.glob("*.json")]
    return sorted(records, key=lambda record: _version(record.environment["tensorflow-cpu"]))


def sums(records: Sequence[Record]) -> str:
    """For the page: all cells under the newest TensorFlow in short, and some under each."""
    newest = records[-1]
    parts = (_by_precision(newest.results), _by_parameters(newest.results), _by_version(records))
    return "\n\n".join([_caption(newest).rstrip(), *parts]) + "\n"


def _by_precision(results: Sequence[Result]) -> str:
    """How many trainings are as they must be, and the one that is nearest to its limit."""
    lines = ["| precision | trained, equal bits | nearest to its limit |", "|---|---|---|"]
    for name, policy in (("float64",) * 2, ("float32",) * 2, ("16 bits", "mixed")):
        found = [result for result in results if policy in result.cell.policy]
        right = [result for result in found if not result.problems]
        if right:
            nearest = max(right, key=lambda r: r.ranks[0].distance / r.ranks[0].tolerance)
            worst = f"{nearest.cell.model}: {_worst([nearest])}"
            lines.append(f"| {name} | {len(right)} of {len(found)} | {worst} |")
    return "\n".join(lines)


def _by_parameters(results: Sequence[Result]) -> str:
    """The models by their size."""
    sizes: dict[str, int] = {}
    for result in results:
        of_ranks = [rank.parameters for rank in result.ranks]
        sizes[result.cell.model] = max(sizes.get(result.cell.model, 0), *of_ranks)
    lines = ["| parameters | models |", "|---|---|"]
    for least, limit in ((0, 2), (2, 10), (10, 40), (40, 1000)):
        models = [m for m, size in sizes.items() if least <= size / 1e6 < limit]
        lines.append(f"| {least} to {limit} M | {len(models)}: {'; '.join(models)} |")
    return "\n".join(lines)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def _caption(record: Record) -> str:
    days = " to ".join(dict.fromkeys((record.days[0], record.days[-1])))
    environment = ", ".join(
        value if name == "machine" else f"{name} {value}"
        for name, value in record.environment.items()
    )
    count = f"{len(record.results)} of the {len(cells())} trainings of the grid"
    return textwrap.fill(f"{count}, {days}, {environment}.", PAGE_COLUMNS) + "\n"


def _by_version(records: Sequence[Record]) -> str:
    """The largest distances of those, one column for each version."""
    heads = ["training"]
    for record in records:
        found = record.environment
        heads.append(f"TF {found['tensorflow-cpu']}, Keras {found['keras']}")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for cell in BY_VERSION:
        of_versions = [
            _worst(result for result in record.results if result.cell == cell) for record in records
        ]
        lines.append(f"| {' | '.join([cell.name, *of_versions])} |")
    return "\n".join(lines)


def table(results: Sequence[Result]) -> str:
    """One line per model; in how many trainings it is as it must be, and the worst distances."""
    heads = ["model", "parameters", "ways", "trained, equal bits", "float64", "float32", "16 bits"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for model in dict.fromkeys(cell.model for cell in cells()):
        found = [result for result in results if result.cell.model == model]
        lines += [_line(model, found)] if found else []
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
