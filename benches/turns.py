"""Two ways to do a step, measured in turns."""

from __future__ import annotations

import time
from collections.abc import Callable

import gradring


def in_turns(
    comm: gradring.Communicator, ways: list[Callable[[], object]], rounds: int, steps: int
) -> list[list[float]]:
    """Seconds of a step in each round, by way; every round begins each of them at a barrier."""

    def seconds(step: Callable[[], object]) -> float:
        comm.barrier()
        started = time.perf_counter()
        for _ in range(steps):
            step()
        return (time.perf_counter() - started) / steps

    return [[seconds(step) for step in ways] for _ in range(rounds)]
