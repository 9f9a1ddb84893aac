"""An elastic program that tells what it sees, for tests of what starts its processes.

Each process writes a line into the file ``seen`` beside the program when it is in a new group, and
when it has come to the end, which is when there is a file ``enough``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.waiting import wait_until

WITHIN_S = 150.0
"""Until a group that a test waits for has formed; engines take their time."""

PROGRAM = Path(__file__).with_name("observed_program.py")


class Job:
    """A job whose processes run `PROGRAM`, as a test sees it."""

    def __init__(self, directory: Path, output: Callable[[], str]) -> None:
        """Copies the program, as ``elastic.py``.

        Args:
            directory: For it, and for what it tells.
            output: What the processes have printed, for messages.
        """
        self.program = directory / "elastic.py"
        self.program.write_text(PROGRAM.read_text())
        self._directory = directory
        self._output = output
        self._known = 0

    def seen(self) -> list[dict[str, Any]]:
        """What the processes have told."""
        seen = self._directory / "seen"
        return [json.loads(line) for line in seen.read_text().splitlines()] if seen.exists() else []

    def group(self, size: int) -> list[dict[str, Any]]:
        """The members by rank of a new group of this size, once all are in it."""

        def members() -> list[dict[str, Any]]:
            groups: dict[int, list[dict[str, Any]]] = {}
            for each in self.seen()[self._known :]:
                if each.get("size") == size:
                    groups.setdefault(each["generation"], []).append(each)
            complete = [group for group in groups.values() if len(group) == size]
            return sorted(complete[-1], key=lambda each: int(each["rank"])) if complete else []

        self._wait(lambda: bool(members()), f"{size} are in a new group")
        found = members()
        self._known = len(self.seen())
        return found

    def ends(self, count: int) -> None:
        """Lets so many processes come to the end, all after the same step."""
        (self._directory / "enough").touch()

        def steps() -> list[int]:
            return [each["done"] for each in self.seen() if "done" in each]

        self._wait(lambda: len(steps()) == count, f"{count} have come to the end")
        assert len(set(steps())) == 1, self.seen()

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        try:
            wait_until(condition, what, WITHIN_S)
        except AssertionError as error:
            raise AssertionError(f"{error}; {self.seen()}\n{self._output()}") from None
