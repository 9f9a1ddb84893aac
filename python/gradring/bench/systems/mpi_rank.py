"""What `mpirun` starts for `mpi`: ``mpi_rank.py SOCKET``, one of its ranks.

It connects to our rank 0, says its MPI rank, and then obeys: a `Problem` is prepared for its own
rank; a number is how often to iterate, and answered with `Samples`. It ends when the connection
does.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradring.bench.systems.mpi import OPS
from gradring.bench.systems.system import LocalReduction
from gradring.bench.values import Problem


def main(address: str) -> None:
    """Serves one connection."""
    import mpi4py

    mpi4py.rc.thread_level = "single"  # no locks
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    with socket.socket(socket.AF_UNIX) as connected:
        connected.connect(address)
        pipe = Connection(connected.detach())
    pipe.send(world.rank)
    reduction: LocalReduction | None = None
    with pipe, contextlib.suppress(EOFError):
        while True:
            command: Problem | int = pipe.recv()
            if isinstance(command, Problem):
                problem = replace(command, rank=world.rank)
                reduction = _InPlace(world, getattr(MPI, OPS[problem.op]), MPI.IN_PLACE, problem)
            else:
                assert reduction is not None
                samples = reduction.iterate(command, world.Barrier)
                # Whoever leaves MPI may owe bytes that another rank still waits for, and sends them
                # only inside of MPI.
                world.Barrier()
                pipe.send(samples)


class _InPlace(LocalReduction):
    def __init__(self, world: Any, op: Any, in_place: Any, problem: Problem) -> None:
        super().__init__(problem.expected())
        self._world, self._op, self._in_place = world, op, in_place
        self._source = problem.source()
        self._buffer = np.empty_like(self._source)

    def reset(self) -> None:
        np.copyto(self._buffer, self._source)

    def run(self) -> None:
        self._world.Allreduce(self._in_place, self._buffer, self._op)

    def result(self) -> NDArray[Any]:
        return self._buffer


if __name__ == "__main__":
    main(sys.argv[1])
