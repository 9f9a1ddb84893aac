"""pytest's side of a run of Keras' tests: a rank writes the verdict of each test for all to see.

`conformance.keras` starts the ranks, with this plugin and a task in the environment. After each
test the ranks wait for each other. Where one failed otherwise than the others, or by an error of
gradring, all end: what is left of the group would spoil the tests that follow.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance.worker import meet

#: The variable that has the path of the task.
TASK = "CONFORMANCE_TASK"


@dataclass
class Task:
    """What one rank is to do.

    Attributes:
        directory: Where the ranks write their verdicts.
        size: The number of ranks.
        tests: Identifiers of the tests to run; empty to run all that pytest selects.
    """

    directory: str
    size: int
    tests: list[str]
    rank: int = field(default_factory=lambda: int(os.environ.get("GRADRING_RANK", "0")))


_task = Task(**json.loads(Path(os.environ[TASK]).read_text())) if TASK in os.environ else None
_session: Any = None
_reports: list[Any] = []
_done = 0


def identifier(test: str) -> str:
    """A test's name without addresses of objects, which differ between processes."""
    return re.sub(r"0x[0-9a-f]{6,}", "0x", test)


def pytest_sessionstart(session: Any) -> None:
    """Keeps the session, which a verdict may end."""
    global _session
    _session = session


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Leaves the task's tests, in pytest's order."""
    if _task is not None and _task.tests:
        wanted = set(_task.tests)
        items[:] = [item for item in items if identifier(item.nodeid) in wanted]


def pytest_runtest_logreport(report: Any) -> None:
    """Keeps what became of a test, its set-up and its end."""
    _reports.append(report)


def pytest_runtest_logfinish(nodeid: str) -> None:
    """Tells the other ranks, and ends with them after a failure that spoils the group."""
    global _done
    if _task is None:
        return
    verdict = json.dumps({"test": identifier(nodeid), **_verdict()})
    _reports.clear()
    texts = meet(Path(_task.directory), str(_done), _task.rank, _task.size, verdict)
    _done += 1
    if spoils([json.loads(text) for text in texts]):
        _session.shouldstop = "a failure that spoils the group"


def _verdict() -> dict[str, str]:
    for status in ("failed", "skipped"):
        for report in _reports:
            if report.outcome == status:
                return {"status": status, "reason": _reason(report)}
    return {"status": "passed", "reason": ""}


def _reason(report: Any) -> str:
    told = report.longrepr
    return str(told[-1]) if isinstance(told, tuple) else str(told)


def spoils(verdicts: list[dict[str, str]]) -> bool:
    """Whether the tests that follow would tell of this failure, and not of themselves."""
    failed = [verdict for verdict in verdicts if verdict["status"] == "failed"]
    if not failed or len(verdicts) == 1:
        return False
    last_lines = {verdict["reason"].strip().rpartition("\n")[2] for verdict in failed}
    is_ours = any("gradring.errors" in verdict["reason"] for verdict in failed)
    return len(failed) < len(verdicts) or len(last_lines) > 1 or is_ours
