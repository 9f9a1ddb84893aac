"""The table of docs/compatibility.md: which tests passed under which versions.

`noxfile.py` records the last run of each column in tests/version_records.json, and the table
is made of that. It replaces what stands between the two marks; everything else of the page is
written by hand.

    PYTHONPATH=tests python -m support.version_table       # writes the table of what is recorded
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from xml.etree import ElementTree

from support.pages import written_between
from support.versions import MATRIX, ROOT, Versions

PAGE = ROOT / "docs" / "compatibility.md"
RECORDS = ROOT / "tests" / "version_records.json"
BEGIN, END = "<!-- made by: make test-matrix -->\n", "<!-- end of what make test-matrix makes -->\n"

#: Rows: the tests whose identifier, such as `test_strategy::test_x[adam-graph]`, contains one of
#: these. The first row that fits takes a test; the last row takes what is left.
FEATURES: dict[str, tuple[str, ...]] = {
    "`tf_keras`: `fit`, clipping, mixed precision": ("test_tf_keras",),
    "saving: `.keras`, weights, SavedModel, checkpoint": ("test_saving",),
    "`broadcast_update`": ("test_broadcast_update",),
    "overlap with the backward pass": ("test_overlap", "overlap_of_a_block", "starts_of_a_call"),
    "`ModelCheckpoint`, `BackupAndRestore`": ("chiefs_backup",),
    "`fit`, `evaluate`, `predict`, callbacks": (
        "test_keras_fit",
        "test_guides",
        "[run_eagerly]",
        "[steps_per_execution]",
        "[on_batches]",
    ),
    "clipping of gradients": ("clip",),
    "gradient accumulation, EMA": ("[accumulation", "[EMA]"),
    "mixed precision (`LossScaleOptimizer`)": ("mixed precision", "overflows"),
    "batch normalisation": ("BN]", "normalisation", "empty_batch"),
    "embeddings, `tf.IndexedSlices`": ("embedding", "test_sparse", "sparse_gradients"),
    "`fit`: SGD, Adam, AdamW": ("[fit-",),
    "custom training loop": ("[loop-", "test_strategy"),
    "`GradientReducer`, `all_reduce`": ("test_collectives", "a_reducer"),
    "errors, names": ("test_failures", "test_names"),
    "the programs of `examples/`": ("test_examples",),
    "bucketing and all else": ("",),
}


@dataclass(frozen=True)
class Result:
    """What became of one test."""

    name: str
    #: passed, skipped or failed
    outcome: str
    reason: str = ""


@dataclass(frozen=True)
class Record:
    """The last run of one column."""

    versions: Versions
    python: str
    machine: str
    day: str
    #: By feature, what became of its tests.
    cells: dict[str, str]
    #: Whether they are versions that come next, under which the quick tests ran.
    is_next: bool = False


def read(report: Path) -> list[Result]:
    """The results in a report of pytest."""
    return [_result_of(case) for case in ElementTree.parse(report).iter("testcase")]


def _result_of(case: ElementTree.Element) -> Result:
    name = f"{case.get('classname')}::{case.get('name')}"
    skipped = case.find("skipped")
    if skipped is not None:
        return Result(name, "skipped", skipped.get("message", ""))
    failed = case.find("failure") is not None or case.find("error") is not None
    return Result(name, "failed" if failed else "passed")


def cells_of(results: list[Result]) -> dict[str, str]:
    """What became of the tests of each feature that has any."""
    rows: dict[str, list[Result]] = {feature: [] for feature in FEATURES}
    for result in results:
        for feature, parts in FEATURES.items():
            if any(part in result.name for part in parts):
                rows[feature].append(result)
                break
    return {feature: _cell(found) for feature, found in rows.items() if found}


def _cell(results: list[Result]) -> str:
    """Such as `12 passed` or `4 passed; 8: needs Keras 3.10`."""
    counts = Counter(result.outcome for result in results)
    reasons = Counter(result.reason for result in results if result.outcome == "skipped")
    # A test that says the opposite of the skipped ones is no gap.
    reasons.pop("this Keras is not refused", None)
    parts = [f"**{counts['failed']} failed**"] if counts["failed"] else []
    parts += [f"{counts['passed']} passed"] if counts["passed"] else []
    parts += [f"{count}: {reason}" for reason, count in sorted(reasons.items())]
    return "; ".join(parts) or "-"


def summary(results: list[Result]) -> str:
    """A line for each file of tests, one for all, and the names of those that failed."""
    of_files: dict[str, Counter[str]] = {}
    for result in results:
        file = result.name.partition("::")[0].rpartition(".")[2]
        of_files.setdefault(file, Counter())[result.outcome] += 1
    of_files["all"] = sum(of_files.values(), Counter())
    width = max(map(len, of_files))
    lines = [f"{file:{width}}  {_counts(counts)}" for file, counts in of_files.items()]
    lines += [f"failed: {result.name}" for result in results if result.outcome == "failed"]
    return "\n".join(lines)


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[it]} {it}" for it in ("passed", "skipped", "failed") if counts[it])


def recorded() -> list[Record]:
    """What was recorded, of each column once; the next versions come last."""
    found = [
        Record(**{**record, "versions": Versions(**record["versions"])})
        for record in json.loads(RECORDS.read_text())
    ]
    places = {versions: place for place, versions in enumerate(MATRIX)}
    known = [record for record in found if record.is_next or record.versions in places]
    return sorted(known, key=lambda it: len(places) if it.is_next else places[it.versions])


def record(new: Record) -> None:
    """Keeps a run in place of the last one of its column, and writes the page."""
    kept = [
        old
        for old in recorded()
        if not (old.is_next and new.is_next) and old.versions != new.versions
    ]
    lines = ",\n".join(json.dumps(asdict(it), ensure_ascii=False) for it in [*kept, new])
    RECORDS.write_text(f"[\n{lines}\n]\n")
    write()


def write() -> None:
    """Writes the table of what is recorded into its page."""
    PAGE.write_text(page(PAGE.read_text()))


def page(text: str) -> str:
    """The page with the table of what is recorded."""
    records = recorded()
    keras_2 = ", ".join(sorted({it.versions.tf_keras for it in records}))
    command = "`make test-matrix`"
    if any(it.is_next for it in records):
        command += " and `make test-next`"
    note = (
        f"Made by {command} with Python {_one(records, 'python')} on {_one(records, 'machine')}; "
        f"tf_keras {keras_2}.\n"
    )
    return written_between(text, BEGIN, END, f"{note}\n{table_of(records)}")


def _one(records: list[Record], fact: str) -> str:
    return ", ".join(sorted({str(getattr(it, fact)) for it in records}))


def table_of(records: list[Record]) -> str:
    """A row for each feature; versions with the same results in all of them share a column."""
    # The order of `FEATURES` says what takes a test first; readers begin with the usual.
    *usual, rest = FEATURES
    features = [*reversed(usual), rest]
    columns: dict[tuple[str, ...], list[str]] = {}
    for each in records:
        cells = (each.day, *(each.cells.get(feature, "-") for feature in features))
        columns.setdefault(cells, []).append(str(each.versions))
    heads = ["feature", *("; ".join(names) for names in columns.values())]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for row in zip(["run on", *features], *columns, strict=True):
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    write()
