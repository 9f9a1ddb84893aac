"""One of the ranks that `mpirun` starts for `mpi`: ``mpi_rank.py SOCKET``.

The process connects to our rank 0, sends its MPI rank, and then handles commands. A `Problem`
prepares a reduction for its own rank. A number runs this many iterations, and the reply is
`Samples`. The process ends with the connection.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection

from gradring.tools.bench.systems.mpi import OPS
from gradring.tools.bench.systems.system import InPlace
from gradring.tools.bench.values import Problem


def main(address: str) -> None:
    """Handles the commands of one connection."""
    import mpi4py

    mpi4py.rc.thread_level = "single"  # no locks
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    with socket.socket(socket.AF_UNIX) as connected:
        connected.connect(address)
        pipe = Connection(connected.detach())
    pipe.send(world.rank)
    reduction: InPlace | None = None
    with pipe, contextlib.suppress(EOFError):
        while True:
            command: Problem | int = pipe.recv()
            if isinstance(command, Problem):
                problem = replace(command, rank=world.rank)
                op = getattr(MPI, OPS[problem.op])
                all_reduce = partial(world.Allreduce, MPI.IN_PLACE, op=op)
                reduction = InPlace(problem, partial(partial, all_reduce))
            else:
                assert reduction is not None
                samples = reduction.iterate(command, world.Barrier)
                # MPI sends pending bytes only inside of its calls; the barrier keeps every rank
                # inside until all have their bytes.
                world.Barrier()
                pipe.send(samples)


if __name__ == "__main__":
    main(sys.argv[1])
