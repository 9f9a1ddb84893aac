"""The interface of a system, and of the file of a peer."""

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
    """What some iterations gave on this rank.

    Attributes:
        durations_s: Time of each in seconds; only rank 0's count.
        wrong: Elements that were not as expected, over all of them.
        cpu_s: Processor time of all threads of the processes that reduced, inside of the durations.
    """

    durations_s: list[float]
    wrong: int
    cpu_s: float = 0.0


class Reduction(Protocol):
    """One all-reduce of one size, made ready to be repeated."""

    def iterate(self, iterations: int, barrier: Callable[[], None]) -> Samples:
        """Performs it that many times, each timed from a barrier on, and checks each result."""


class LocalReduction(ABC):
    """A reduction that happens in this process."""

    def __init__(self, expected: NDArray[Any]) -> None:
        self.expected = expected

    def iterate(self, iterations: int, barrier: Callable[[], None]) -> Samples:
        """Only what stands between the two clock readings is timed."""
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
        """Elements of the last result that are not as expected."""
        return values.count_wrong(self.result(), self.expected)

    @abstractmethod
    def reset(self) -> None:
        """Puts the input in place and spoils the last result; not timed."""

    @abstractmethod
    def run(self) -> None:
        """Performs the all-reduce and returns when this rank has its result; timed."""

    @abstractmethod
    def result(self) -> NDArray[Any]:
        """What the last run produced; not timed."""


class InPlace(LocalReduction):
    """An all-reduce that overwrites its buffer; the source is copied into it before each."""

    def __init__(
        self, problem: Problem, bound: Callable[[NDArray[Any]], Callable[[], object]]
    ) -> None:
        """Makes the buffer.

        Args:
            problem: What is to be reduced.
            bound: Given the buffer, returns what reduces it.
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
        """The buffer."""
        return self._buffer


@dataclass(frozen=True)
class System:
    """Something that performs all-reduces among the ranks.

    Attributes:
        name: As it stands in the table.
        transport: What carries the bytes.
        prepare: Makes an all-reduce ready; may enter collectives of its own; None: not at this
            size.
        algorithm: How the bytes were reduced; asked after a run.
    """

    name: str
    transport: str
    prepare: Callable[[Problem], Reduction | None]
    algorithm: Callable[[], str] = lambda: "ring"


class Peer(Protocol):
    """What the module of a peer in this package has."""

    def missing(self) -> str | None:
        """What is not installed here, with the command that installs it; None if all is there."""

    def refusal(self, dtype: str, op: str, world_size: int, hosts: int) -> str | None:
        """Why it cannot be compared in this, as a message; None if it can."""

    def version(self) -> str:
        """Its name and version, once it is known not to be missing."""

    def open_systems(
        self, groups: Sequence[Communicator], closing: contextlib.ExitStack
    ) -> Sequence[System]:
        """Sets the peer up among the ranks of ``groups``, which all call it.

        Args:
            groups: Of the same ranks, by transport and checksum; the first brings them together.
            closing: For what has to end after the last measurement.
        """


def missing_module(name: str, module: str, install: str) -> str | None:
    """The message of `Peer.missing` for a peer that is one Python module."""
    if importlib.util.find_spec(module) is not None:
        return None
    return f"{name} is not installed here; run: {install}"
