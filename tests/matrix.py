"""`make test-matrix`: the TensorFlow tests under several versions, and the table of what they say.

Each environment has the built wheel, and is kept below `.venv-matrix` with its last results. The
table, of all columns that have results, replaces what stands between the two marks of
docs/compatibility.md; everything else there is written by hand.

    python tests/matrix.py dist/gradring-*.whl          # all environments
    python tests/matrix.py dist/gradring-*.whl 3 4      # only the third and fourth column

`make test-real-models` trains real models in the environments with the newest Keras of each
TensorFlow, and all of them in the developer's; real_models/report.py writes their tables.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from pages import written_between

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs" / "compatibility.md"
ENVIRONMENTS = ROOT / ".venv-matrix"
BEGIN, END = "<!-- made by: make test-matrix -->\n", "<!-- end of what make test-matrix makes -->\n"
#: For all tests of one environment.
TIMEOUT_S = 1800


@dataclass(frozen=True)
class Versions:
    """One column of the table. `tf_keras` is released with each TensorFlow."""

    tensorflow: str
    keras: str
    tf_keras: str
    #: Other packages that the tests need; versions where TensorFlow's own bounds ask for some.
    others: tuple[str, ...] = ()

    @property
    def directory(self) -> Path:
        return ENVIRONMENTS / f"tensorflow-{self.tensorflow}-keras-{self.keras}"

    @property
    def report(self) -> Path:
        return self.directory / "results.xml"

    @property
    def python(self) -> Path:
        return self.directory / "bin" / "python"


#: For each TensorFlow the Keras of its days, the oldest whose `fit` works, or the newest.
MATRIX = (
    Versions("2.16.2", "3.3.3", "2.16.0"),
    Versions("2.16.2", "3.15.1", "2.16.0"),
    Versions("2.18.1", "3.9.2", "2.18.0"),
    Versions("2.18.1", "3.10.0", "2.18.0"),
    Versions("2.20.0", "3.12.4", "2.20.1"),
    Versions("2.21.0", "3.15.1", "2.21.0"),
)

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


def main() -> int:
    """Runs the chosen columns, or all; 1 if a test has failed in one of the table."""
    parser = argparse.ArgumentParser(prog="python tests/matrix.py", description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("columns", type=int, nargs="*", help="from 1 on; default: all")
    parser.add_argument("--real-models", action="store_true", help="train these; no other test")
    given = parser.parse_args()
    newest = {versions.tensorflow: versions for versions in MATRIX}
    default = list(newest.values())[:-1] if given.real_models else MATRIX
    failed = 0
    for versions in [MATRIX[column - 1] for column in given.columns] or default:
        print(f"== TensorFlow {versions.tensorflow}, Keras {versions.keras}", flush=True)
        make_environment(versions, given.wheel.absolute())
        if given.real_models:
            failed |= train_real_models(versions)
        else:
            run_tests(versions)
    if given.real_models:
        return failed
    results = {versions: read(versions.report) for versions in MATRIX if versions.report.exists()}
    table = table_of(results)
    write(table)
    print(table)
    return int(any(result.outcome == "failed" for column in results.values() for result in column))


def make_environment(versions: Versions, wheel: Path) -> None:
    """A new one, or what is there with this wheel: the versions are part of its name."""

    def install(*arguments: str) -> None:
        quiet = ("--quiet", "--disable-pip-version-check")
        command = [str(versions.python), "-m", "pip", "install", *quiet, *arguments]
        subprocess.run(command, check=True)

    if not versions.python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(versions.directory)], check=True)
        try:
            install(
                f"tensorflow-cpu=={versions.tensorflow}",
                f"keras=={versions.keras}",
                *("pytest>=8", "pytest-timeout>=2.3", "scikit-learn>=1.4", "matplotlib>=3.8"),
                *versions.others,
            )
            # It wants the package `tensorflow`, which tensorflow-cpu is not.
            install("--no-deps", f"tf_keras=={versions.tf_keras}")
        except BaseException:
            shutil.rmtree(versions.directory)
            raise
    install("--no-deps", "--force-reinstall", str(wheel))


@dataclass(frozen=True)
class Result:
    """What became of one test."""

    name: str
    #: passed, skipped or failed
    outcome: str
    reason: str = ""


def run_tests(versions: Versions) -> None:
    """Where the package of the source tree cannot be found, so that the wheel is imported."""
    versions.report.unlink(missing_ok=True)
    environment = {name: v for name, v in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(
        [
            *(str(versions.python), "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"),
            *("-m", "slow or not slow"),
            *("-o", "junit_family=xunit1", f"--junitxml={versions.report}"),
            *(str(ROOT / "tests" / folder) for folder in ("gradients", "tensorflow", "examples")),
        ],
        cwd=versions.directory,
        env=environment,
        timeout=TIMEOUT_S,
        check=False,
    )


def train_real_models(versions: Versions) -> int:
    """The eight trainings of `make test`, of which those that went right are recorded."""
    command = ["-m", "real_models.report", "--by-version", "--record"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    return subprocess.run(
        [str(versions.python), *command], cwd=versions.directory, env=environment, check=False
    ).returncode


def read(report: Path) -> list[Result]:
    return [result_of(case) for case in ElementTree.parse(report).iter("testcase")]


def result_of(case: ElementTree.Element) -> Result:
    name = f"{case.get('classname')}::{case.get('name')}"
    skipped = case.find("skipped")
    if skipped is not None:
        return Result(name, "skipped", skipped.get("message", ""))
    failed = case.find("failure") is not None or case.find("error") is not None
    return Result(name, "failed" if failed else "passed")


def by_feature(results: list[Result]) -> dict[str, list[Result]]:
    rows: dict[str, list[Result]] = {feature: [] for feature in FEATURES}
    for result in results:
        for feature, parts in FEATURES.items():
            if any(part in result.name for part in parts):
                rows[feature].append(result)
                break
    return rows


def table_of(results: dict[Versions, list[Result]]) -> str:
    """A row for each feature; versions with the same results in all of them share a column."""
    # The order of `FEATURES` says what takes a test first; readers begin with the usual.
    *usual, rest = FEATURES
    features = [*reversed(usual), rest]
    columns: dict[tuple[str, ...], list[str]] = {}
    for versions, found in results.items():
        day = datetime.date.fromtimestamp(versions.report.stat().st_mtime)
        rows = by_feature(found)
        cells = (str(day), *(cell(rows[feature]) for feature in features))
        columns.setdefault(cells, []).append(f"TF {versions.tensorflow}, Keras {versions.keras}")
    heads = ["feature", *("; ".join(names) for names in columns.values())]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for row in zip(["run on", *features], *columns, strict=True):
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def cell(results: list[Result]) -> str:
    """Such as `12 passed` or `4 passed; 8: needs Keras 3.10`."""
    counts = Counter(result.outcome for result in results)
    reasons = Counter(result.reason for result in results if result.outcome == "skipped")
    # A test that says the opposite of the skipped ones is no gap.
    reasons.pop("this Keras is not refused", None)
    parts = [f"**{counts['failed']} failed**"] if counts["failed"] else []
    parts += [f"{counts['passed']} passed"] if counts["passed"] else []
    parts += [f"{count}: {reason}" for reason, count in sorted(reasons.items())]
    return "; ".join(parts) or "-"


def write(table: str) -> None:
    keras_2 = ", ".join(sorted({versions.tf_keras for versions in MATRIX}))
    note = (
        f"Made by `make test-matrix` with Python {platform.python_version()} on "
        f"{platform.system()} {platform.machine()}; tf_keras {keras_2}.\n"
    )
    TABLE.write_text(written_between(TABLE.read_text(), BEGIN, END, f"{note}\n{table}"))


if __name__ == "__main__":
    sys.exit(main())
