"""The tables of `docs/internals/conformance.md`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from conformance.run import Verdict

COLUMNS = ("passed", "failed", "skipped", "not applicable")


def table(results: Mapping[str, Sequence[Verdict]]) -> str:
    """A Markdown table: a row per file, a column per status, and a row of sums."""
    rows = [("file", *COLUMNS), ("---", *["---:"] * len(COLUMNS))]
    total: Counter[str] = Counter()
    for file, verdicts in results.items():
        counts = Counter(verdict.status for verdict in verdicts)
        total += counts
        rows.append((f"`{file}`", *(str(counts[column]) for column in COLUMNS)))
    rows.append(("all", *(str(total[column]) for column in COLUMNS)))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
