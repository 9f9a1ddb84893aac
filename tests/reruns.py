"""``--rerun``: a failed test runs once more in a fresh process, which tells chance from defects.

If it passes there and no value was wrong, the run is green, says ``flaky: NAME`` at its end, and
notes it in tests/flaky.txt. That file is to be empty: who finds a line there mends the test.
"""

from __future__ import annotations

import datetime
import subprocess
import sys
from pathlib import Path

import pytest

RECORD = Path(__file__).with_name("flaky.txt")
FILES_AT_MOST = 3
"""Where more files fail, it is not by chance."""
ABOUT_VALUES = ("AssertionError", "crashed while running", "DID NOT RAISE")
"""In the report of a failure that stays one: a wrong value, or a process that crashed."""


class Reruns:
    """The failures of one run, and what became of them."""

    def __init__(self, record: Path) -> None:
        self.record = record
        self.failed: dict[str, list[str]] = {}
        self.about_values: set[str] = set()
        self.lines: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.failed:
            return
        names = self.failed.setdefault(report.nodeid.partition("::")[0], [])
        if report.nodeid not in names:
            names.append(report.nodeid)
        if any(sign in report.longreprtext for sign in ABOUT_VALUES):
            self.about_values.add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus != pytest.ExitCode.TESTS_FAILED or not self.failed:
            return
        if len(self.failed) > FILES_AT_MOST:
            self.lines = [f"not run again: tests of {len(self.failed)} files failed"]
            return
        root = session.config.rootpath
        wheel = session.config.getoption("--wheel", None)
        options = ["--wheel", str(wheel)] if wheel else []
        for names in self.failed.values():
            command = [sys.executable, "-m", "pytest", "-q", *options, *names]
            again = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
            if again.returncode:
                self.lines += [f"failed again: {name}" for name in names]
                self.lines += again.stdout.splitlines()
            else:
                self.lines += [self._verdict(name) for name in names]
        flaky = [line for line in self.lines if line.startswith("flaky: ")]
        if len(flaky) == len(self.lines):
            session.exitstatus = pytest.ExitCode.OK
        with self.record.open("a") as file:
            file.writelines(f"{datetime.date.today()} {line}\n" for line in flaky)

    def _verdict(self, name: str) -> str:
        """What is said of a test that passed the second time."""
        if name in self.about_values:
            return f"passed the second time, but a value was wrong: {name}"
        return f"flaky: {name}"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self.lines:
            terminalreporter.write_line(line)
