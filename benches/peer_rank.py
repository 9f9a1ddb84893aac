"""Rank 1 of the benchmarks: does what rank 0, the pytest process, announces.

Announcements are collectives too: rank 0 broadcasts a row of integers, and both act on it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from enum import IntEnum
from typing import cast

import numpy as np

import gradring
from gradring.bench import values
from gradring.bench.systems import LocalReduction, LocalSystem, load_peer
from gradring.bench.systems.own import Gradring

OP, DTYPE = "sum", "float32"
#: As TensorFlow's own: shared memory would be no like to gRPC.
TRANSPORT = "tcp"


class Command(IntEnum):
    PREPARE = 0
    RUN = 1
    CHECK = 2
    STOP = 3


class Bench:
    """One rank's systems, and the reduction that is being measured."""

    def __init__(self, comm: gradring.Communicator, systems: Sequence[LocalSystem]) -> None:
        self.comm = comm
        self.systems = systems
        self.reduction: LocalReduction
        self._has_run = False
        self._wrong = 0

    def announce(self, command: Command, system: int = 0, size_bytes: int = 0) -> None:
        """On rank 0: says what comes next."""
        self.comm.broadcast(np.array([command, system, size_bytes]), name="bench/command")

    def listen(self) -> tuple[Command, int, int]:
        """On the other ranks: hears what comes next."""
        row = np.zeros(3, np.int64)
        self.comm.broadcast(row, name="bench/command")
        return Command(int(row[0])), int(row[1]), int(row[2])

    def prepare(self, system: int, size_bytes: int) -> None:
        comm, count = self.comm, size_bytes // values.dtype_of(DTYPE).itemsize
        problem = values.Problem(comm.rank, comm.world_size, count, OP, DTYPE)
        self.reduction = self.systems[system].prepare(problem)
        self._has_run, self._wrong = False, 0

    def line_up(self) -> None:
        """Checks the last run, makes the next one ready, and waits for the other rank."""
        self._check()
        self.reduction.reset()
        self.comm.barrier()
        self._has_run = True

    def wrong(self) -> int:
        """Wrong elements of all runs since `prepare`, over all ranks."""
        self._check()
        wrong = np.array([self._wrong])
        return int(self.comm.all_reduce(wrong, name="bench/wrong")[0])

    def _check(self) -> None:
        if self._has_run:
            self._wrong += values.count_wrong(self.reduction.result(), self.reduction.expected)
            self._has_run = False


def open_bench(comm: gradring.Communicator) -> Bench:
    """Opens our system and TensorFlow's; all ranks call it."""
    # Nothing of TensorFlow needs to be closed.
    tensorflow = load_peer("tensorflow").open_systems(comm, contextlib.ExitStack())
    return Bench(comm, [Gradring(comm), *cast("Sequence[LocalSystem]", tensorflow)])


def follow() -> None:
    with gradring.init(transport=TRANSPORT) as comm:
        bench = open_bench(comm)
        while True:
            command, system, size_bytes = bench.listen()
            if command is Command.PREPARE:
                bench.prepare(system, size_bytes)
            elif command is Command.RUN:
                bench.line_up()
                bench.reduction.run()
            elif command is Command.CHECK:
                bench.wrong()
            else:
                return


if __name__ == "__main__":
    follow()
