"""Several ways to do a step, measured in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

import gradring

#: None on a rank that has no part in a way: it waits for the others.
Step = Callable[[], object] | None


def in_turns(
    comm: gradring.Communicator,
    ways: Mapping[str, Step],
    rounds: int,
    steps: int = 1,
    *,
    warm_ups: int = 0,
) -> dict[str, NDArray[Any]]:
    """Seconds of each step, `[rounds, steps]`, by way; every round begins each way at a barrier."""

    def seconds(step: Step, steps: int) -> NDArray[Any]:
        comm.barrier()
        if step is None:
            return np.zeros(steps)
        ends = [time.perf_counter()]
        for _ in range(steps):
            step()
            ends.append(time.perf_counter())
        return np.diff(ends)

    for step in ways.values():
        seconds(step, warm_ups)
    measured = [[seconds(step, steps) for step in ways.values()] for _ in range(rounds)]
    return dict(zip(ways, np.stack(measured, axis=1), strict=True))
