"""gradring over numpy arrays, in place."""

from __future__ import annotations

from functools import partial

from gradring.group.communicator import Communicator
from gradring.tools.bench.systems.system import InPlace
from gradring.tools.bench.values import Problem


class Gradring:
    """`Communicator.all_reduce`."""

    def __init__(
        self, comm: Communicator, transport: str | None = None, *, automatic: bool = False
    ) -> None:
        """Measures through ``comm``.

        Args:
            comm: What reduces.
            transport: How the table calls it; by default as the communicator does.
            automatic: Whether the name has to say that gradring chose the transport.
        """
        self.comm = comm
        stats = comm.stats()
        chosen = " auto" if automatic else ""
        self.name = f"gradring{chosen}{'+checksum' if stats['checksum'] else ''}"
        self.transport: str = transport or stats["transport"]

    @property
    def algorithm(self) -> str:
        """What the last all-reduce used."""
        return self.comm.stats()["algorithm"]

    def prepare(self, problem: Problem) -> InPlace:
        """Makes an all-reduce ready."""
        # By position: keywords of a partial cost as much as a tenth of the smallest all-reduce.
        return InPlace(problem, lambda buffer: partial(self.comm.all_reduce, buffer, problem.op))
