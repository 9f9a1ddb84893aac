"""The interfaces of a system and of a peer's module."""

from __future__ import annotations

import contextlib
import importlib.util
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gradring.group.communicator import Communicator
from gradring.tools.bench import values
from gradring.tools.bench.values import Problem


@dataclass(frozen=True)
class Samples:
    """The result of some iterations on this rank.

    Attributes:
        durations_s: Time of each iteration in seconds; only rank 0's are used.
        wrong: Number of unexpected elements, over all iterations.
        cpu_s: Processor time of all threads of the reducing processes, within the durations.
    """

    durations_s: list[float]
    wrong: int
    cpu_s: float = 0.0


class Reduction(Protocol):
    """One prepared all-reduce of one size, which can be repeated."""

    def iterate(self, iterations: int, barrier: Callable[[], None]) -> Samples:
        """Runs it `iterations` times, each timed after a barrier, and checks each result."""


class LocalReduction(ABC):
    """A reduction in this process."""

    def __init__(self, expected: NDArray[Any]) -> None:
        self.expected = expected

    def iterate(self, iterations: int, barrier: Callable[[], None]) -> Samples:
        """Times `run` only; `reset`, the barrier and the check are not included."""
        durations_s, wrong, cpu_s = [], 0, 0.0
        for _ in range(iterations):
            self.reset()
            barrier()
            cpu_start, start = time.process_time(), time.perf_counter()
            self.run()
            durations_s.append(time.perf_counter() - start)
            cpu_s += time.process_time() - cpu_start
            wrong += self.count_wrong()
        return Samples(durations_s, wrong, cpu_s)

    def count_wrong(self) -> int:
        """Returns the number of unexpected elements of the last result."""
        return values.count_wrong(self.result(), self.expected)

    @abstractmethod
    def reset(self) -> None:
        """Copies the input into place and overwrites the last result; not timed."""

    @abstractmethod
    def run(self) -> None:
        """Performs the all-reduce and returns when this rank has its result; timed."""

    @abstractmethod
    def result(self) -> NDArray[Any]:
        """Returns the result of the last run; not timed."""


class InPlace(LocalReduction):
    """An all-reduce that overwrites its buffer; the source is copied into it before each run."""

    def __init__(
        self, problem: Problem, bound: Callable[[NDArray[Any]], Callable[[], object]]
    ) -> None:
        """Makes the buffer.

        Args:
            problem: The values to reduce.
            bound: Returns a function that reduces a given buffer.
        """
        super().__init__(problem.expected())
        self._source = problem.source()
        self._buffer = np.empty_like(self._source)
        self._reduce = bound(self._buffer)

    def reset(self) -> None:
        """Copies the source into the buffer."""
        np.copyto(self._buffer, self._source)

    def run(self) -> None:
        """Reduces the buffer."""
        self._reduce()

    def result(self) -> NDArray[Any]:
        """Returns the buffer."""
        return self._buffer


@dataclass(frozen=True)
class System:
    """An implementation of all-reduce between the ranks.

    Attributes:
        name: Name in the table.
        transport: Transport of the bytes.
        prepare: Prepares an all-reduce, perhaps with collectives of its own; returns None if this
            size is not measured.
        algorithm: Returns the algorithm of the last run.
        barrier: The system's own barrier; None to use that of the group in which all are measured.
    """

    name: str
    transport: str
    prepare: Callable[[Problem], Reduction | None]
    algorithm: Callable[[], str] = lambda: "ring"
    barrier: Callable[[], None] | None = None


class Peer(Protocol):
    """The interface of a peer's module in this package."""

    def missing(self) -> str | None:
        """Returns the missing package with the command to install it; None if all are installed."""

    def refusal(self, dtype: str, op: str, world_size: int, hosts: int) -> str | None:
        """Returns the reason why the peer cannot be compared here; None if it can."""

    def version(self) -> str:
        """Returns the peer's name and version; it must be installed."""

    def open_systems(
        self, groups: Sequence[Communicator], closing: contextlib.ExitStack
    ) -> Sequence[System]:
        """Sets the peer up on the ranks of ``groups``; all ranks call it.

        Args:
            groups: Groups of the same ranks, by transport and checksum; the first serves for
                set-up.
            closing: Stack of resources to close after the last measurement.
        """


def missing_module(name: str, module: str, install: str) -> str | None:
    """Returns the message of `Peer.missing` for a peer that is one Python module."""
    if importlib.util.find_spec(module) is not None:
        return None
    return f"{name} is not installed here; run: {install}"
