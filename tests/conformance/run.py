"""Starts the workers of a test file, notices what hangs, collects the verdicts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from conformance.suite import TestFile
from conformance.worker import verdict_path
from gradring.launch.processes import RankProcesses
from gradring.machine.ports import LOOPBACK, free_ports

START_S = 60.0
"""How long TensorFlow may take to start, beyond a test's own time."""
TEST_S = 60.0
"""How long a test may take; most take less than one second."""
GRACE_S = 5.0
"""How long the other workers may take when one has failed."""
POLL_S = 0.05
_OUTPUT_LINES = 15


@dataclass(frozen=True)
class Verdict:
    """What became of a test.

    Attributes:
        test: Class and method, with parameters.
        status: `passed`, `failed`, `skipped` or `not applicable`.
        reason: Why it did not pass; the traceback of a failure.
    """

    test: str
    status: str
    reason: str = ""

    @property
    def headline(self) -> str:
        """The line of the reason that names the exception, or else its last one."""
        lines = self.reason.strip().splitlines() or [""]
        named = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
        return (named or lines)[-1]


def run_file(file: TestFile, path: Path, strategy: str, only: str = "") -> list[Verdict]:
    """Runs the tests of one file that concern several workers.

    Args:
        file: What to run.
        path: Where the file is.
        strategy: `gradring` or `mwms`.
        only: Leaves out tests whose name does not contain it.
    """
    tests = [test for test in list_tests(file, path) if file.selects(test) and only in test]
    verdicts = {}
    if strategy == "gradring":
        reasons = {test: file.why_not(test) for test in tests}
        verdicts = {t: Verdict(t, "not applicable", why) for t, why in reasons.items() if why}
    for workers in sorted({file.workers_of(test) for test in tests}):
        left = [t for t in tests if file.workers_of(t) == workers and t not in verdicts]
        while left:
            for verdict in _run_some(file, path, strategy, workers, left):
                verdicts[verdict.test] = verdict
                _print(verdict)
            left = [test for test in left if test not in verdicts]
    return [verdicts[test] for test in tests]


def list_tests(file: TestFile, path: Path) -> list[str]:
    """The names of all tests of a file."""
    with tempfile.TemporaryDirectory(prefix="conformance-") as directory:
        world = _Workers(file, path, "", Path(directory), 1, [])
        world.run()
        answer = world.answers(0)[0]
        if answer is None:
            raise RuntimeError(f"{path.name} cannot be executed:\n{world.output(0)}")
        return json.loads(answer)["tests"].split()  # type: ignore[no-any-return]


def _run_some(
    file: TestFile, path: Path, strategy: str, workers: int, tests: list[str]
) -> list[Verdict]:
    """Runs tests until one fails."""
    with tempfile.TemporaryDirectory(prefix="conformance-") as directory:
        world = _Workers(file, path, strategy, Path(directory), workers, tests)
        world.run()
        verdicts = []
        for index, test in enumerate(tests):
            verdict = world.verdict(index, test)
            verdicts.append(verdict)
            if verdict.status == "failed":
                break
        return verdicts


class _Workers:
    """The workers of one start."""

    def __init__(
        self,
        file: TestFile,
        path: Path,
        strategy: str,
        directory: Path,
        count: int,
        tests: list[str],
    ) -> None:
        self._directory = directory
        self._count = count
        *addresses, rendezvous = [f"{LOOPBACK}:{port}" for port in free_ports(count + 1)]
        self._tasks = [
            {
                "file": str(path.resolve()),
                "strategy": strategy,
                "directory": str(directory),
                "rank": rank,
                "addresses": addresses,
                "rendezvous": rendezvous,
                "widened": file.widened,
                "tests": tests,
            }
            for rank in range(count)
        ]
        self._ended: list[int | None] = []

    def run(self) -> None:
        """Returns when all workers have ended, or have been ended because one made no progress."""
        environ = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_NUM_INTRAOP_THREADS": "1"}
        environ |= {
            "GRADRING_TIMEOUT_S": str(TEST_S / 3),
            "GRADRING_STALL_TIMEOUT_S": str(TEST_S / 3),
            "PYTHONFAULTHANDLER": "1",
        }
        environ.pop("TF_CONFIG", None)
        environ["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        with RankProcesses() as processes:
            for rank, task in enumerate(self._tasks):
                order = self._directory / f"task-{rank}.json"
                order.write_text(json.dumps(task))
                command = [sys.executable, "-m", "conformance.worker", str(order)]
                with open(self._output_path(rank), "wb") as output:
                    processes.start(command, environ, stdout=output, stderr=subprocess.STDOUT)
            deadline, seen = time.monotonic() + START_S + TEST_S, 0
            while processes.running() and time.monotonic() < deadline:
                time.sleep(POLL_S)
                processes.poll()
                answers = len(list(self._directory.glob("*.[0-9]")))
                if answers > seen:
                    seen, deadline = answers, time.monotonic() + TEST_S
                if any(p.exit_code is not None for p in processes.ranks) or self._has_failed():
                    deadline = min(deadline, time.monotonic() + GRACE_S)
            self._ended = [process.exit_code for process in processes.ranks]

    def answers(self, index: int) -> list[str | None]:
        """What each worker wrote at that test, or None."""
        paths = [verdict_path(self._directory, str(index), rank) for rank in range(self._count)]
        return [path.read_text() if path.exists() else None for path in paths]

    def verdict(self, index: int, test: str) -> Verdict:
        """Combines the workers' verdicts: one failure fails the test."""
        answers = [json.loads(answer) if answer else None for answer in self.answers(index)]
        for status in ("failed", None, "skipped", "passed"):
            for rank, answer in enumerate(answers):
                if answer is None and status is None:
                    return Verdict(test, "failed", self._what_happened_to(rank))
                if answer is not None and answer["status"] == status:
                    return Verdict(test, answer["status"], answer["reason"])
        raise AssertionError("every test has a verdict")

    def output(self, rank: int) -> str:
        """The last lines that a worker printed."""
        lines = self._output_path(rank).read_text(errors="replace").splitlines()
        return "\n".join(lines[-_OUTPUT_LINES:])

    def _what_happened_to(self, rank: int) -> str:
        code = self._ended[rank]
        end = "did not finish in time" if code is None else f"ended with exit code {code}"
        return f"{self.output(rank)}\nworker {rank} {end}"

    def _has_failed(self) -> bool:
        newest = sorted(self._directory.glob("*.[0-9]"), key=lambda p: p.stat().st_mtime)[-1:]
        return any('"status": "failed"' in path.read_text() for path in newest)

    def _output_path(self, rank: int) -> Path:
        return self._directory / f"output-{rank}.txt"


def _print(verdict: Verdict) -> None:
    print(f"{verdict.status:8} {verdict.test}  {verdict.headline[:300]}", flush=True)
