"""Keras' own tests, as users run them: plain, and by ``gradring run --with-strategy -m pytest``.

``python -m conformance.keras CHECKOUT [file or folder...]`` takes the tests from a checkout of
Keras at the installed version, and runs them against the installed package: in one process, on one
rank and on two. The files of a folder share a group. A test that passes in one process must pass on
ranks, or be in the table of `keras_left`. Ranks run the same tests in the same order. After a
failure the tests that follow run in a new group.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from conformance import keras_left
from conformance.keras_plugin import TASK
from conformance.run import GRACE_S, POLL_S, Verdict
from conformance.worker import verdict_path
from gradring.launch.processes import RankProcesses

START_S = 180.0
"""How long importing TensorFlow and Keras, and collecting a file's tests, may take."""
TEST_S = 120.0
"""How long a test may take; most take less than one second."""
STALL_S = 20.0
"""How long a rank waits for a collective that the others do not begin."""
FILES = 20
"""How many files share a process: graphs stay in its memory."""
_PYTEST = (
    "-q",
    "--continue-on-collection-errors",
    "-p",
    "no:cacheprovider",
    "--import-mode=importlib",
    "--tb=native",
)
_SOURCES = Path("keras/src")


def main() -> int:
    """Runs the chosen files; returns 1 where a test is lost on ranks without a known reason."""
    parser = argparse.ArgumentParser(prog="conformance.keras", description=__doc__)
    parser.add_argument("checkout", type=Path, help="of Keras at the installed version")
    parser.add_argument("places", nargs="*", default=["trainers"], help="as trainers, losses")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--select", default="", help="an expression, as of pytest -k")
    parser.add_argument("--output", type=Path, help="adds every verdict to this file, as JSON")
    options = parser.parse_args()
    results: dict[str, dict[str, list[Verdict]]] = {}
    if options.output and options.output.exists():
        kept = json.loads(options.output.read_text())
        results = {
            file: {n: _verdicts(those) for n, those in by.items()} for file, by in kept.items()
        }
    with tempfile.TemporaryDirectory(prefix="keras-tests-") as directory:
        copied = Path(directory)
        for files in by_folder(copy_tests(options.checkout, copied, options.places)):
            results |= run_files(copied, files, options.select, options.ranks)
            if options.output:
                options.output.write_text(json.dumps(results, indent=1, default=asdict))
    print(table(results))
    lost = list(lost_in(results))
    for ranks, verdict, reason in lost:
        print(f"{ranks}: {verdict.test}  {reason or verdict.headline[:200]}")
    return int(any(reason is None for _, _, reason in lost))


def _verdicts(those: Sequence[Any]) -> list[Verdict]:
    return [Verdict(**each) for each in those]


def copy_tests(checkout: Path, target: Path, places: Sequence[str]) -> list[str]:
    """Copies the tests alone, so that they import the installed Keras; returns their files."""
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(checkout / name, target / name)
    found = []
    for place in places:
        path = checkout / _SOURCES / place
        tests = [path] if path.is_file() else sorted(path.rglob("*_test.py"))
        if not tests:
            sys.exit(f"{path} has no tests; give a checkout of Keras")
        for test in tests:
            file = test.relative_to(checkout / _SOURCES)
            (target / file.parent).mkdir(parents=True, exist_ok=True)
            shutil.copy(test, target / file)
            found.append(str(file))
    return found


def by_folder(files: Sequence[str]) -> list[list[str]]:
    """The files that one process runs in turn, since starting it takes longer than a test."""
    grouped = itertools.groupby(files, lambda file: Path(file).parent)
    return [
        those[begin : begin + FILES]
        for those in (list(each) for _, each in grouped)
        for begin in range(0, len(those), FILES)
    ]


def run_files(
    directory: Path, files: Sequence[str], select: str, ranks: Sequence[int]
) -> dict[str, dict[str, list[Verdict]]]:
    """The verdicts by file: plain, and by number of ranks of the tests that pass plain."""
    found = {"plain": _run(directory, files, select, 0, [])}
    passed = [verdict.test for verdict in found["plain"] if verdict.status == "passed"]
    _print(files, "plain", found["plain"])
    for count in ranks if passed else ():
        verdicts: dict[str, Verdict] = {}
        left = passed
        while left:
            verdicts |= {each.test: each for each in _run(directory, files, select, count, left)}
            left = [test for test in left if test not in verdicts]
        found[str(count)] = list(verdicts.values())
        _print(files, f"{count} ranks" if count > 1 else "1 rank", found[str(count)])
    return {
        file: {
            kind: [each for each in those if each.test.partition("::")[0] == file]
            for kind, those in found.items()
        }
        for file in files
    }


def _run(
    directory: Path, files: Sequence[str], select: str, ranks: int, tests: list[str]
) -> list[Verdict]:
    """Runs tests until one spoils the group; at least one has a verdict."""
    with tempfile.TemporaryDirectory(prefix="conformance-") as meetings:
        group = _Group(Path(meetings), ranks, tests)
        chosen = list(dict.fromkeys(test.partition("::")[0] for test in tests)) or files
        group.run(directory, [*chosen, *_PYTEST, *(["-k", select] if select else [])])
        verdicts = group.verdicts()
        if group.is_complete or (verdicts and verdicts[-1].status == "failed"):
            return verdicts
        if not tests and len(files) > 1:
            return [each for file in files for each in _run(directory, [file], select, 0, [])]
        if not tests:
            return [*verdicts, Verdict(f"{files[0]}::all", "failed", group.output())]
        done = {verdict.test for verdict in verdicts}
        begun = next((test for test in tests if test not in done), None)
        return verdicts if begun is None else [*verdicts, Verdict(begun, "failed", group.output())]


class _Group:
    """One start of pytest: plain, or on ranks."""

    def __init__(self, meetings: Path, ranks: int, tests: list[str]) -> None:
        self._meetings = meetings
        self._ranks = ranks
        self._tests = tests
        self._size = max(ranks, 1)
        self._order = meetings / "task.json"
        self._order.write_text(
            json.dumps({"directory": str(meetings), "size": self._size, "tests": tests})
        )
        #: Whether all ended by themselves.
        self.is_complete = False

    def run(self, directory: Path, arguments: list[str]) -> None:
        """Returns when all ranks have ended, or have been ended because none made progress."""
        pytest = ["-m", "pytest", "-p", "conformance.keras_plugin", *arguments]
        command = [sys.executable, *pytest]
        if self._ranks:
            run = ["gradring", "run", "-np", str(self._ranks), "--with-strategy"]
            command = [sys.executable, "-m", *run, *pytest]
        paths = [str(directory), *(str(Path(entry or ".").resolve()) for entry in sys.path)]
        environ = os.environ | {
            TASK: str(self._order),
            "PYTHONPATH": os.pathsep.join(paths),
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "GRADRING_TIMEOUT_S": str(STALL_S),
            "GRADRING_STALL_TIMEOUT_S": str(STALL_S),
        }
        with RankProcesses() as processes, open(self._meetings / "output.txt", "wb") as output:
            there = ["env", "-C", str(directory), *command]
            processes.start(there, environ, stdout=output, stderr=subprocess.STDOUT)
            deadline, seen = time.monotonic() + START_S + TEST_S, 0
            while processes.running() and time.monotonic() < deadline:
                time.sleep(POLL_S)
                processes.poll()
                answers = len(list(self._meetings.glob("*.[0-9]")))
                if answers > seen:
                    seen, deadline = answers, time.monotonic() + TEST_S
                    if self._tests and answers == len(self._tests) * self._size:
                        deadline = time.monotonic() + GRACE_S
            self.is_complete = not processes.running()

    def verdicts(self) -> list[Verdict]:
        """Those of the tests that all ranks have ended; one failure fails a test."""
        found: list[Verdict] = []
        index = 0
        while all(path.exists() for path in self._paths(index)):
            answers = [json.loads(path.read_text()) for path in self._paths(index)]
            if len({answer["test"] for answer in answers}) > 1:
                reason = f"the ranks ran different tests: {answers}"
                return [*found, Verdict(answers[0]["test"], "failed", reason)]
            order = ("failed", "skipped", "passed")
            worst = min(answers, key=lambda answer: order.index(answer["status"]))
            found.append(Verdict(worst["test"], worst["status"], worst["reason"]))
            index += 1
        return found

    def output(self) -> str:
        """The last lines that the ranks printed."""
        text = (self._meetings / "output.txt").read_text(errors="replace")
        return "\n".join([*text.splitlines()[-40:], "did not finish"])

    def _paths(self, index: int) -> list[Path]:
        return [verdict_path(self._meetings, str(index), rank) for rank in range(self._size)]


def lost_in(results: dict[str, dict[str, list[Verdict]]]) -> Any:
    """The tests that pass plain and not on ranks: the ranks, the verdict, and the known reason."""
    for by_ranks in results.values():
        for ranks, verdicts in by_ranks.items():
            for verdict in verdicts if ranks != "plain" else ():
                if verdict.status != "passed":
                    yield ranks, verdict, keras_left.why(verdict.test, int(ranks))


def table(results: dict[str, dict[str, list[Verdict]]]) -> str:
    """A Markdown table: a row for each folder, with passed tests of those that pass plain."""
    folders: dict[str, Counter[str]] = {}
    for file, by_ranks in results.items():
        counts = folders.setdefault(str(Path(file).parent), Counter())
        for ranks, verdicts in by_ranks.items():
            counts.update(f"{ranks} {verdict.status}" for verdict in verdicts)
    columns = ("plain passed", "plain failed", "plain skipped", "1 passed", "2 passed")
    rows = [("folder", *columns), ("---", *["---:"] * len(columns))]
    total: Counter[str] = sum(folders.values(), Counter())
    for folder, counts in [*sorted(folders.items()), ("all", total)]:
        name = folder if folder == "all" else f"`{folder}`"
        has = {key.partition(" ")[0] for key in counts}
        rows.append((name, *(str(counts[it]) if it.split()[0] in has else "" for it in columns)))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _print(files: Sequence[str], kind: str, verdicts: Sequence[Verdict]) -> None:
    counts = Counter(verdict.status for verdict in verdicts)
    said = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    place = files[0] if len(files) == 1 else f"{Path(files[0]).parent}, {len(files)} files"
    print(f"{place}: {kind}: {said}", flush=True)
    for verdict in verdicts:
        if verdict.status == "failed":
            print(f"    {verdict.test}  {verdict.headline[:200]}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
