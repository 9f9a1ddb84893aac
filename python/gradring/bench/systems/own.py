"""gradring over numpy arrays, in place."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradring.bench.systems.system import LocalReduction
from gradring.bench.values import Problem
from gradring.communicator import Communicator


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
        self._comm = comm
        stats = comm.stats()
        chosen = " auto" if automatic else ""
        self.name = f"gradring{chosen}{'+checksum' if stats['checksum'] else ''}"
        self.transport: str = transport or stats["transport"]

    @property
    def algorithm(self) -> str:
        """What the last all-reduce used."""
        algorithm: str = self._comm.stats()["algorithm"]
        return algorithm

    def prepare(self, problem: Problem) -> InPlace:
        """Makes an all-reduce ready."""
        return InPlace(self._comm, problem)


class InPlace(LocalReduction):
    """An all-reduce that overwrites its buffer; the source is copied into it before each."""

    def __init__(self, comm: Communicator, problem: Problem) -> None:
        super().__init__(problem.expected())
        self._comm = comm
        self._source = problem.source()
        self._buffer = np.empty_like(self._source)
        self._op = problem.op

    def reset(self) -> None:
        """Copies the source into the buffer."""
        np.copyto(self._buffer, self._source)

    def run(self) -> None:
        """Reduces the buffer."""
        self._comm.all_reduce(self._buffer, op=self._op)

    def result(self) -> NDArray[Any]:
        """The buffer."""
        return self._buffer
