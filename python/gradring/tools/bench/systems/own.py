"""gradring over numpy arrays, in place."""

from __future__ import annotations

from functools import partial

from gradring.group.communicator import Communicator
from gradring.tools.bench.systems.system import InPlace, System
from gradring.tools.bench.values import Problem


def own_system(
    comm: Communicator, transport: str | None = None, *, automatic: bool = False
) -> System:
    """Returns `Communicator.all_reduce` as a system.

    Args:
        comm: The group.
        transport: Name of the transport in the table; default: the communicator's name.
        automatic: True to show in the name that gradring chose the transport.
    """

    def prepare(problem: Problem) -> InPlace:
        # Positional, since keywords of a partial take a tenth of the smallest all-reduce's time.
        return InPlace(problem, lambda buffer: partial(comm.all_reduce, buffer, problem.op))

    stats = comm.stats()
    chosen = " auto" if automatic else ""
    name = f"gradring{chosen}{'+checksum' if stats['checksum'] else ''}"
    return System(
        name,
        transport or stats["transport"],
        prepare,
        algorithm=lambda: comm.stats()["algorithm"],
        barrier=comm.barrier,
    )
