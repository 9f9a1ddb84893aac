"""gradring over numpy arrays, in place."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradring.communicator import Communicator


class Gradring:
    """`Communicator.all_reduce`."""

    name = "gradring"

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.transport: str = comm.stats()["transport"]

    @property
    def algorithm(self) -> str:
        """What the last all-reduce used."""
        algorithm: str = self._comm.stats()["algorithm"]
        return algorithm

    def prepare(self, source: NDArray[Any], op: str) -> InPlace:
        """Makes an all-reduce of ``source`` ready."""
        return InPlace(self._comm, source, op)


class InPlace:
    """An all-reduce that overwrites its buffer; the source is copied into it before each."""

    def __init__(self, comm: Communicator, source: NDArray[Any], op: str) -> None:
        self._comm = comm
        self._source = source
        self._buffer = np.empty_like(source)
        self._op = op

    def reset(self) -> None:
        """Copies the source into the buffer."""
        np.copyto(self._buffer, self._source)

    def run(self) -> None:
        """Reduces the buffer."""
        self._comm.all_reduce(self._buffer, op=self._op)

    def result(self) -> NDArray[Any]:
        """The buffer."""
        return self._buffer
