"""Adds up by layer what llvm-cov and coverage.py report: `coverage_table.py REPORT.json...`."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


COUNTED = ("lines", "reached_lines", "branches", "reached_branches")
#: The same as coverage.py calls it.
OF_COVERAGE = ("num_statements", "covered_lines", "num_branches", "covered_branches")


def files(report: dict[str, Any]) -> Iterator[tuple[Path, Counter[str]]]:
    """The path of each file, and what of it there is and was reached."""
    if "data" in report:  # of llvm-cov
        for file in report["data"][0]["files"]:
            kinds = [file["summary"][kind] for kind in ("lines", "branches")]
            counts = [kind[what] for kind in kinds for what in ("count", "covered")]
            yield Path(file["filename"]), Counter(dict(zip(COUNTED, counts, strict=True)))
    else:
        for name, file in report["files"].items():
            counts = [file["summary"][what] for what in OF_COVERAGE]
            yield Path(name), Counter(dict(zip(COUNTED, counts, strict=True)))


def layer(file: Path) -> str:
    """The folder of a crate or package, without what is below it."""
    parts = file.parts
    at = max(index for index, part in enumerate(parts) if part in ("rust", "gradring"))
    depth = 4 if parts[at] == "rust" else 2
    return "/".join(parts[at : at + depth][: len(parts) - 1 - at])


def share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else ""


def main() -> None:
    layers: dict[str, Counter[str]] = {}
    for report in sys.argv[1:]:
        for file, counts in files(json.loads(Path(report).read_text())):
            layers.setdefault(layer(file), Counter()).update(counts)
    print("| layer | lines | branches |\n|---|---|---|")
    for name, found in sorted(layers.items()):
        lines = share(found["reached_lines"], found["lines"])
        print(f"| `{name}` | {lines} | {share(found['reached_branches'], found['branches'])} |")


if __name__ == "__main__":
    main()
