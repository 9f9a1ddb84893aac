"""Waiting for what other processes do."""

import time
from collections.abc import Callable

DEADLINE_S = 60.0


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Waits with a wide deadline; ``what`` is the fact that never became true."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.02)
