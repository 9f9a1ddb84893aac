"""Rank 1 of the benchmarks: takes part in whatever rank 0, the pytest process, says next.

It says a system and a size, then how often to reduce and whether that is timed, again and again
until it is 0 times; a size of 0 is the end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import cast

import numpy as np

import gradring
from gradring.config.values import Transport
from gradring.tools.bench import values
from gradring.tools.bench.systems import LocalReduction, System, load_peer

OP: gradring.ReduceOp = "sum"
DTYPE = "float32"
#: As TensorFlow's own: shared memory would be no like to gRPC.
TRANSPORT: Transport = "tcp"


def told(comm: gradring.Communicator, *numbers: int) -> list[int]:
    """Two numbers that rank 0 gives, and the other rank gets."""
    row = np.zeros(2, np.int64)
    row[: len(numbers)] = numbers
    return cast("list[int]", comm.broadcast(row, name="bench/next").tolist())


def prepared(comm: gradring.Communicator, system: System, size_bytes: int) -> LocalReduction:
    count = size_bytes // values.dtype_of(DTYPE).itemsize
    problem = values.Problem(comm.rank, comm.world_size, count, OP, DTYPE)
    return cast(LocalReduction, system.prepare(problem))


def totals(comm: gradring.Communicator, wrong: int, cpu_s: float) -> tuple[int, float]:
    """Wrong elements and processor time of all ranks."""
    both = comm.all_reduce(np.array([wrong, cpu_s]), name="bench/totals")
    return int(both[0]), float(both[1])


def open_systems(comm: gradring.Communicator) -> Sequence[System]:
    """Opens TensorFlow's systems, and ours inside TensorFlow; all ranks call it."""
    # Nothing of TensorFlow needs to be closed.
    return load_peer("tensorflow").open_systems([comm], contextlib.ExitStack())


def follow() -> None:
    with gradring.init(transport=TRANSPORT) as comm:
        systems = open_systems(comm)
        while (order := told(comm))[1]:
            reduction = prepared(comm, systems[order[0]], order[1])
            wrong, cpu_s = 0, 0.0
            while (turn := told(comm))[0]:
                samples = reduction.iterate(turn[0], comm.barrier)
                wrong += samples.wrong
                cpu_s += samples.cpu_s * turn[1]
            totals(comm, wrong, cpu_s)


if __name__ == "__main__":
    follow()
