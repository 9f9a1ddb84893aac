"""Tests of Keras that pass in one process and not on ranks, each with the reason."""

from __future__ import annotations

import re

#: By pattern of the test's identifier: the fewest ranks at which it fails, and why.
LEFT: dict[str, tuple[int, str]] = {}


def why(test: str, ranks: int) -> str | None:
    """The reason why a test cannot pass on so many ranks, or None."""
    found = (
        reason
        for pattern, (fewest, reason) in LEFT.items()
        if fewest <= ranks and re.search(pattern, test)
    )
    return next(found, None)
