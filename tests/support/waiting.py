"""Waiting for what other processes do."""

import os
import time
from collections.abc import Callable
from pathlib import Path

DEADLINE_S = 60.0

SOON_LOST = {"_GRADRING_SILENCE_S": "3"}
"""For ranks that are to find out that another one is silent, which takes 10 s by itself."""


def wait_until(
    condition: Callable[[], bool],
    what: str,
    within_s: float = DEADLINE_S,
    pause_s: float = 0.02,
) -> None:
    """Waits with a wide deadline; ``what`` is the fact that never became true.

    Without a pause it also sees what is true for a moment.
    """
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(pause_s)


def meet(place: Path, count: int) -> None:
    """Returns when so many processes have come here: nobody still starts."""
    place.mkdir(exist_ok=True)
    (place / str(os.getpid())).touch()
    wait_until(lambda: len(list(place.iterdir())) >= count, "all have started")
