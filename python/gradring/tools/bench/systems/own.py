"""gradring over numpy arrays, in place."""

from __future__ import annotations

from functools import partial

from gradring.group.communicator import Communicator
from gradring.tools.bench.systems.system import InPlace, System
from gradring.tools.bench.values import Problem


def own_system(
    comm: Communicator, transport: str | None = None, *, automatic: bool = False
) -> System:
    """`Communicator.all_reduce`.

    Args:
        comm: What reduces.
        transport: How the table calls it; by default as the communicator does.
        automatic: Whether the name has to say that gradring chose the transport.
    """

    def prepare(problem: Problem) -> InPlace:
        # By position: keywords of a partial cost as much as a tenth of the smallest all-reduce.
        return InPlace(problem, lambda buffer: partial(comm.all_reduce, buffer, problem.op))

    stats = comm.stats()
    chosen = " auto" if automatic else ""
    name = f"gradring{chosen}{'+checksum' if stats['checksum'] else ''}"
    return System(name, transport or stats["transport"], prepare, lambda: comm.stats()["algorithm"])
