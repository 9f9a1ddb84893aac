"""Signals between the ranks of a drill and its director: files in one directory."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.002


@dataclass(frozen=True)
class Stage:
    """A directory in which a file says that something has happened, and carries a number."""

    directory: Path

    def tell(self, what: str, number: float = 0) -> None:
        """Says that ``what`` has happened; the file appears in one step."""
        # Several processes may say the same.
        unfinished = self.directory / f".{what}-{os.getpid()}"
        unfinished.write_text(repr(number))
        os.replace(unfinished, self.directory / what)

    def told(self, what: str) -> float | None:
        """The number that came with ``what``, or None if it has not happened."""
        try:
            return float((self.directory / what).read_text())
        except FileNotFoundError:
            return None

    def wait(self, *what: str, within_s: float = 60.0) -> None:
        """Returns when all of it has happened.

        Raises:
            TimeoutError: It has not happened in time, or before all was ``over``.
        """
        deadline = time.monotonic() + within_s
        for one in what:
            while self.told(one) is None:
                if self.told("over") is not None and self.told(one) is None:
                    raise TimeoutError(f"{one} had not happened when all was over")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{one} has not happened within {within_s} s")
                time.sleep(POLL_S)
