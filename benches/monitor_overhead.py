"""The cost of a `gradring.Monitor` for each step: ``python -m benches.monitor_overhead``.

Two ranks reduce a small array, which is all that a step does, so that the overhead shows; steps
with and without a monitor take turns. The monitor prints nothing, as on all ranks but 0.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np

import gradring
from benches.harness import Parser, in_turns
from gradring.testing import run_ranks

ROUNDS = 15
STEPS = 400
STEP_MS = 1.0


def _rank() -> list[Any]:
    with gradring.init() as comm:
        x = np.ones(1000, np.float32)

        def step() -> None:
            comm.all_reduce(x, op="mean", name="g")

        def monitored_step() -> None:
            step()
            monitor.step()

        monitor = gradring.Monitor(comm, every_s=1.0, stream=io.StringIO())
        monitor.step()
        ways = {"without": step, "monitored": monitored_step}
        found = in_turns(comm, ways, ROUNDS, STEPS)
        return [steps_s.mean(axis=1) for steps_s in found.values()]


def main() -> None:
    """Measures and prints."""
    Parser(__doc__).parse()
    without, monitored = run_ranks(_rank, 2)[0]
    added_us = 1e6 * np.median(monitored - without)
    without_us, with_us = 1e6 * np.median(without), 1e6 * np.median(monitored)
    print(f"step without a monitor {without_us:.2f} us, with one {with_us:.2f} us")
    print(
        f"added: {added_us:.2f} us, {added_us / (10 * STEP_MS):.2f} % of a step of {STEP_MS:g} ms"
    )


if __name__ == "__main__":
    main()
