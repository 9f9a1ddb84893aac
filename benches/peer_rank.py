"""Rank 1 of the benchmarks: takes part in whatever rank 0, the pytest process, says next.

It says a system and a size, then how often to reduce, again and again until that is 0; a size of 0
is the end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import cast

import numpy as np

import gradring
from gradring.bench import values
from gradring.bench.systems import LocalReduction, LocalSystem, load_peer
from gradring.bench.systems.own import Gradring

OP, DTYPE = "sum", "float32"
#: As TensorFlow's own: shared memory would be no like to gRPC.
TRANSPORT = "tcp"


def told(comm: gradring.Communicator, *numbers: int) -> list[int]:
    """Two numbers that rank 0 gives, and the other rank gets."""
    row = np.zeros(2, np.int64)
    row[: len(numbers)] = numbers
    return cast("list[int]", comm.broadcast(row, name="bench/next").tolist())


def prepared(comm: gradring.Communicator, system: LocalSystem, size_bytes: int) -> LocalReduction:
    count = size_bytes // values.dtype_of(DTYPE).itemsize
    return system.prepare(values.Problem(comm.rank, comm.world_size, count, OP, DTYPE))


def total(comm: gradring.Communicator, wrong: int) -> int:
    """Wrong elements of all ranks."""
    return comm.all_reduce(wrong, name="bench/wrong")


def open_systems(comm: gradring.Communicator) -> Sequence[LocalSystem]:
    """Opens our system and TensorFlow's; all ranks call it."""
    # Nothing of TensorFlow needs to be closed.
    tensorflow = load_peer("tensorflow").open_systems(comm, contextlib.ExitStack())
    return [Gradring(comm), *cast("Sequence[LocalSystem]", tensorflow)]


def follow() -> None:
    with gradring.init(transport=TRANSPORT) as comm:
        systems = open_systems(comm)
        while (order := told(comm))[1]:
            reduction = prepared(comm, systems[order[0]], order[1])
            wrong = 0
            while iterations := told(comm)[0]:
                wrong += reduction.iterate(iterations, comm.barrier).wrong
            total(comm, wrong)


if __name__ == "__main__":
    follow()
