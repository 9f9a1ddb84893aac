"""What every rank of a benchmark runs.

The clock: all ranks pass a barrier, then rank 0 measures how long its own call takes, as nccl-tests
does for its first rank. The call ends when rank 0 has the whole result, to which every rank had to
contribute, so a rank that is late is in the time. The barrier comes before every iteration, so
that no iteration hides behind the one before. Copying the input into place and checking the result
happen on all ranks outside of the clock.

All systems are measured in turns: round by round, a share of the iterations each. A machine that
changes its speed does so for all of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import gradring
from gradring.bench import values
from gradring.bench.measurement import Measurement, to_json
from gradring.bench.plan import Plan
from gradring.bench.systems import Reduction, System, load_peer
from gradring.bench.systems.own import Gradring
from gradring.communicator import Communicator

ROUNDS = 5
CELL_S = 1.5
"""Time that the iterations of one system at one size may take, with their checks."""
MIN_ITERATIONS, MAX_ITERATIONS = 2 * ROUNDS, 1000
WARM_UP_ITERATIONS = 3
"""The first of them traces, allocates and connects; the last tells how long one takes."""


def measure(plan: Plan, progress: str | None = None) -> list[Measurement]:
    """Joins the group and measures everything in the plan; all ranks return the same rows.

    Args:
        plan: What to measure.
        progress: A file to which rank 0 appends the rows of each size as they are ready.
    """
    with gradring.init(transport=plan.transport, algorithm=plan.algorithm) as comm:
        systems: list[System] = [Gradring(comm)]
        for name in plan.peers:
            systems.extend(load_peer(name).open_systems(comm))
        rows: list[Measurement] = []
        for size_bytes in plan.sizes:
            measured = measure_size(comm, systems, plan, size_bytes)
            if progress is not None and comm.rank == 0:
                with Path(progress).open("a") as file:
                    file.write(to_json(measured).replace("\n", "") + "\n")
            rows.extend(measured)
        comm.barrier()  # peers that end early make some systems complain
        return rows


def measure_size(
    comm: Communicator, systems: Sequence[System], plan: Plan, size_bytes: int
) -> list[Measurement]:
    """Measures all systems at one size, in turns; one row for each, in the order of ``systems``."""
    world_size, op, dtype = comm.world_size, plan.op, plan.dtype
    count = size_bytes // values.dtype_of(dtype).itemsize
    source = values.contribution(comm.rank, world_size, count, op, dtype)
    expected = values.expectation(world_size, count, op, dtype)
    cells = [_Cell(comm, system, system.prepare(source, op), expected) for system in systems]
    shares = [_iterations_per_round(comm, cell, plan.iterations) for cell in cells]
    for number in range(ROUNDS):
        for cell, share in zip(cells, shares, strict=True):
            for _ in range(share[number]):
                cell.iterate()
    return [cell.measurement(dtype, size_bytes) for cell in cells]


@dataclass
class _Cell:
    """One system at one size."""

    comm: Communicator
    system: System
    reduction: Reduction
    expected: NDArray[Any]
    algorithm: str = ""
    wrong: int = 0
    durations_s: list[float] = field(default_factory=list)

    def iterate(self, *, timed: bool = True) -> None:
        self.reduction.reset()
        self.comm.barrier()
        start = time.perf_counter()
        self.reduction.run()
        duration_s = time.perf_counter() - start
        self.algorithm = self.system.algorithm
        self.wrong += values.count_wrong(self.reduction.result(), self.expected)
        if timed:
            self.durations_s.append(duration_s)

    def measurement(self, dtype: str, size_bytes: int) -> Measurement:
        """The row, which all ranks agree on: rank 0's times, and everybody's wrong elements."""
        durations_s = np.array(self.durations_s)
        self.comm.broadcast(durations_s, name="bench/durations")
        wrong = self.comm.all_reduce(np.array([self.wrong]), name="bench/wrong")
        return Measurement.of(
            durations_s.tolist(),
            system=self.system.name,
            transport=self.system.transport,
            algorithm=self.algorithm,
            world_size=self.comm.world_size,
            dtype=dtype,
            size_bytes=size_bytes,
            wrong=int(wrong[0]),
        )


def _iterations_per_round(comm: Communicator, cell: _Cell, wanted: int | None) -> list[int]:
    """Warms the cell up and divides its iterations among the rounds; rank 0 decides."""
    for _ in range(WARM_UP_ITERATIONS):
        start = time.perf_counter()
        cell.iterate(timed=False)
        last_s = time.perf_counter() - start
    fitting = min(max(int(CELL_S / last_s), MIN_ITERATIONS), MAX_ITERATIONS)
    total = np.array([fitting if wanted is None else wanted])
    comm.broadcast(total, name="bench/iterations")
    quotient, rest = divmod(int(total[0]), ROUNDS)
    return [quotient + (number < rest) for number in range(ROUNDS)]
