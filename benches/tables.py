"""The tables of recorded runs in pages: `python -m benches.tables PAGE.md ...`.

Wherever a page has a comment like the following, the table after it is written anew from the
record, so that no number of it is typed by hand:

    <!-- table of benches/results/all-reduce.json: ratios -->

The colon is followed by one of these:

`ranges`             the smallest and the largest ratio of each system, over all sizes
`ratios`             the ratio of each system at each size
`times`              the times of gradring at each size
`many ranks`         p50, p90 and p99 for each number of ranks, of several records
`processor time`     the processor seconds of all ranks for each GB
`lines between hosts`  the bandwidth of each system over that of raw links, in the same turns, and
                     its processor seconds for each GB, of several records (`network-*.json`)
`model steps`        the medians of a record of `python -m benches.model_steps --json`
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from benches.model_steps import Row, recorded_steps
from gradring.tools.bench.comparison import (
    ARRAY,
    QUANTILES,
    STRATEGY,
    Comparison,
    called,
    comparisons,
    label,
    times_as_long,
    times_us,
)
from gradring.tools.bench.measurement import Measurement
from gradring.tools.bench.options import format_size
from gradring.tools.bench.systems.link import NAME
from gradring.tools.bench.table import compared, format_ratio, format_time

ROOT = Path(__file__).parents[1]
RANGES, RATIOS, TIMES = "ranges", "ratios", "times"
STEPS = "model steps"
LINES, MANY, PROCESSOR = "lines between hosts", "many ranks", "processor time"
#: What tells rows apart in a table of several records.
_ROWS = {
    LINES: ["hosts x ranks", "links", "size"],
    MANY: ["ranks", "size"],
    PROCESSOR: ["size"],
}
_PLACE = re.compile(r"--hosts (?P<hosts>\d+) --rate (?P<rate>\S+)")
_TABLE = re.compile(
    r"(?P<comment><!-- table of (?P<record>\S+): (?P<kind>[^>]+) -->\n\n)(?P<rows>(?:\|.*\n)+)"
)
_OUTPUT = re.compile(
    r"(?P<head><!-- output of (?P<record>\S+) -->\n\n```text\n).*?(?P<end>^```\n)",
    re.DOTALL | re.MULTILINE,
)
_TITLES = {
    "gradring+checksum": "gradring, checksums",
    "gradring-op": "gradring",
    "gradring-strategy": "gradring",
    "gradring tcp": "gradring",
    "gradring tls": "gradring, TLS",
    "tensorflow-raw": "TensorFlow",
    "tensorflow-strategy": "MWMS",
    "gloo": "Gloo",
}


_COLUMNS = {
    "gradring auto": "gradring",
    "gradring-strategy": "gradring's strategy",
}
#: What stands in a table of several records, where it is not arrays alone.
_CALLED = {LINES: (ARRAY, STRATEGY)}
#: Below, processor time is one of calls and not of bytes.
_LARGE_BYTES = 64 << 10
_KEYS = [field.name for field in fields(Measurement)]


@dataclass(frozen=True)
class Recorded:
    """What `gradring bench all-reduce --json` has written."""

    command: str
    versions: str
    measurements: list[Measurement]

    @classmethod
    def read(cls, path: Path) -> Recorded:
        """Reads a file.

        Raises:
            OSError: It cannot be read.
            ValueError: It is something else.
        """
        found = json.loads(path.read_text())
        try:
            rows = [Measurement(**{k: row[k] for k in _KEYS if k in row}) for row in found]
            return cls(found[0]["command"], found[0]["versions"], rows)
        except (LookupError, TypeError):
            raise ValueError(f"{path} has no measurements of gradring bench all-reduce") from None

    def title(self, row: Measurement, rows: Sequence[Measurement]) -> str:
        """How the page calls the system of ``row``, one of ``rows``."""
        if row.system == "mpi":
            return "Intel MPI" if "Intel" in self.versions else "Open MPI"
        name = label(row, rows)
        return _TITLES.get(name, name)

    def ranges(self, comparisons_: Iterable[Comparison]) -> dict[tuple[str, str], list[str]]:
        """By kind and title of a system: its smallest and its largest ratio of p50, p90 and p99."""
        ratios: dict[tuple[str, str], list[tuple[float | None, ...]]] = {}
        for comparison in comparisons_:
            if comparison.base is not None:
                for row in comparison.rows[1:]:
                    key = comparison.kind, self.title(row, comparison.rows)
                    ratios.setdefault(key, []).append(times_as_long(row, comparison.base))
        return {
            key: [_range(column) for column in zip(*rows, strict=True)]
            for key, rows in ratios.items()
        }


def rewritten(page: str, root: Path = ROOT) -> str:
    """The page with all its tables written anew.

    Raises:
        OSError: A record cannot be read.
        ValueError: It is none, or does not have what a table is to show.
    """

    def written(found: re.Match[str]) -> str:
        paths = sorted(root.glob(found["record"]))
        if not paths:
            raise ValueError(f"there is no {found['record']}")
        if found["kind"] == STEPS:
            table = _steps(recorded_steps(paths[0]))
        elif found["kind"] in _ROWS:
            table = _over_records([Recorded.read(path) for path in paths], found["kind"])
        elif found["kind"] in (RATIOS, TIMES):
            table = _over_sizes(Recorded.read(paths[0]), found["kind"])
        elif found["kind"] == RANGES:
            table = _ranges(Recorded.read(paths[0]))
        else:
            raise ValueError(f"there is no table of {found['kind']}")
        return found["comment"] + markdown(table)

    def printed(found: re.Match[str]) -> str:
        lines = compared(Recorded.read(root / found["record"]).measurements)
        return "".join([found["head"], *(f"{line}\n" for line in lines), found["end"]])

    return _OUTPUT.sub(printed, _TABLE.sub(written, page))


def markdown(table: Iterable[Iterable[str]]) -> str:
    """Rows of cells, of which the first is the head, as a table."""
    head, *rows = (f"| {' | '.join(cells)} |\n" for cells in table)
    return "".join([head, "|" + "---|" * head.count(" | "), "---|\n", *rows])


def _ranges(recorded: Recorded) -> list[list[str]]:
    ranges = recorded.ranges(comparisons(recorded.measurements))
    return [["like with like", "others", *QUANTILES], *([*key, *r] for key, r in ranges.items())]


def _over_sizes(recorded: Recorded, kind: str) -> list[list[str]]:
    """A line for each size, and a column for each kind, or for each other system of it."""
    columns: list[str] = []
    rows: dict[str, dict[str, str]] = {}
    for comparison in comparisons(recorded.measurements):
        if comparison.base is None:
            continue
        cells = {comparison.kind: _times(comparison.base)}
        if kind == RATIOS:
            cells = {
                f"{recorded.title(row, comparison.rows)}, {comparison.kind}": _ratios(
                    row, comparison.base
                )
                for row in comparison.rows[1:]
            }
        columns += [column for column in cells if column not in columns]
        rows.setdefault(format_size(comparison.bytes), {}).update(cells)
    return [["size", *columns], *([s, *(c.get(n, "") for n in columns)] for s, c in rows.items())]


def _steps(rows: Sequence[Row]) -> list[list[str]]:
    """A line for each model: its custom loop, `fit`, which has fewer ways, and one thread each.

    The last column is left out if nothing was measured with one thread.
    """
    ways = {"loop": ("alone", "apart", "gradring", "MWMS"), "fit": ("apart", "gradring")}
    heads = [*ways["loop"], "adds", *(f"fit: {way}" for way in (*ways["fit"], "adds"))]
    own = {row.model: _adds(row) for row in rows if row.threads != "default"}
    table = {"model": [*heads, *(["one thread: adds"] if own else [])]}
    for row in rows:
        if row.threads == "default":
            times = [f"{row.p50_ms[way]:.0f}" for way in ways[row.program]]
            table.setdefault(row.model, []).extend((*times, _adds(row)))
    return [[model, *cells, *filter(None, [own.get(model)])] for model, cells in table.items()]


def _adds(row: Row) -> str:
    return f"{row.p50_ms['gradring'] / row.p50_ms['apart'] - 1:+.0%}"


def _over_records(records: Iterable[Recorded], kind: str) -> list[list[str]]:
    """A column for each system that gets an array, and between hosts for strategies, too."""
    columns: list[str] = []
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for recorded in records:
        links = {row.bytes: row.busbw_gbps for row in recorded.measurements if row.system == NAME}
        for row in recorded.measurements:
            if called(row.system) not in _CALLED.get(kind, (ARRAY,)):
                continue
            if row.system.startswith(NAME) or (kind == LINES and row.bytes not in links):
                continue
            if kind == PROCESSOR and row.bytes < _LARGE_BYTES:
                continue
            cell = _cell(row, kind, links.get(row.bytes))
            column = _column(recorded.title(row, [row]), row, kind)
            if column not in columns:
                columns.append(column)
            rows.setdefault(_place(recorded, row, kind), {})[column] = cell
    head = [*_ROWS[kind], *columns]
    return [head, *([*place, *(c.get(n, "") for n in columns)] for place, c in rows.items())]


def _cell(row: Measurement, kind: str, link_gbps: float | None) -> str:
    if kind == MANY:
        return _times(row)
    processor = "-" if row.cpu_s_per_gb is None else f"{row.cpu_s_per_gb:.2g}"
    if kind == PROCESSOR or link_gbps is None:
        return processor
    return f"{row.busbw_gbps / link_gbps:.0%}, {processor}"


def _place(recorded: Recorded, row: Measurement, kind: str) -> tuple[str, ...]:
    """What tells the row of a measurement from others."""
    size = format_size(row.bytes)
    if kind == PROCESSOR:
        return (size,)
    if kind == MANY:
        return str(row.world_size), size
    found = _PLACE.search(recorded.command)
    if found is None:
        raise ValueError(f"{recorded.command!r} has no hosts whose links have a rate")
    per_host = row.world_size // int(found["hosts"])
    return f"{found['hosts']} x {per_host}", found["rate"], size


def _column(title: str, row: Measurement, kind: str) -> str:
    title = _COLUMNS.get(row.system, title)
    if kind in (MANY, PROCESSOR):
        return f"{title}, {'TCP' if row.transport == 'tcp' else 'memory'}"
    return f"{title}, memory in hosts" if row.transport == "shm+tcp" else title


def _times(row: Measurement) -> str:
    """``7.5 / 91 / 130 us``: a unit stands where the next one is another, and at the end."""
    texts = ["-" if us is None else format_time(us) for us in times_us(row)]
    units = [text.partition(" ")[2] for text in texts]
    following = [*units[1:], ""]
    return " / ".join(
        text.partition(" ")[0] if unit == after else text
        for text, unit, after in zip(texts, units, following, strict=True)
    )


def _ratios(row: Measurement, base: Measurement) -> str:
    return " / ".join(map(_ratio, times_as_long(row, base)))


def _ratio(ratio: float | None) -> str:
    """Bold where the other system is faster."""
    if ratio is None:
        return "-"
    text = format_ratio(ratio).removesuffix("x")
    return f"**{text}**" if ratio < 0.995 else text


def _range(ratios: Sequence[float | None]) -> str:
    known = [ratio for ratio in ratios if ratio is not None]
    if not known:
        return "-"
    lowest, highest = (format_ratio(f(known)).removesuffix("x") for f in (min, max))
    return f"{lowest} to {highest}"


def main(arguments: list[str] | None = None) -> None:
    """Rewrites pages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("pages", type=Path, metavar="PAGE.md", nargs="+")
    options = parser.parse_args(arguments)
    try:
        for page in options.pages:
            page.write_text(rewritten(page.read_text()))
    except (OSError, ValueError) as error:
        raise SystemExit(f"benches.tables: {error}") from None


if __name__ == "__main__":
    main()
