"""A round of random collectives; every result is compared with the exact one, bit by bit."""

from __future__ import annotations

import os
import random
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import gradring
from gradring.gradients.checks import REDUCE_OPS
from gradring.group.communicator import Communicator
from gradring.tools.bench import values
from soak import plan as plans
from soak.plan import Plan

DEPTH = 64
"""Most asynchronous collectives under way at a time."""
SMALL, MIDDLE, LARGE = (1, 7, 64, 1000, 4097), 65_537, 1 << 20
SIZES = (SMALL, (MIDDLE,), (LARGE,))
HOW_OFTEN = (0.985, 0.014, 0.001)
"""Of small, middle and large arrays: most of a soak's collectives have to be cheap."""


class PlannedError(Exception):
    """What a program raises in a round whose fault is an exception."""


@dataclass(frozen=True)
class Case:
    """What each rank brings to an all-reduce, and what all get."""

    op: gradring.ReduceOp
    sources: list[NDArray[Any]]
    expected: NDArray[Any]

    @classmethod
    def of(
        cls, world_size: int, count: int, op: gradring.ReduceOp, dtype: str, narrow: bool = False
    ) -> Case:
        """The case of one size; ``narrow``: of values that also 16-bit floats hold exactly."""
        made = "bfloat16" if narrow else dtype
        wanted = values.dtype_of(dtype)
        ranks = [values.Problem(rank, world_size, count, op, made) for rank in range(world_size)]
        sources = [each.source().astype(wanted) for each in ranks]
        return cls(op, sources, ranks[0].expected().astype(wanted))


class Cases:
    """All cases of a part, made once, so that they weigh the same in every measurement."""

    def __init__(self, world_size: int) -> None:
        """Makes small cases of every dtype and op, and large ones of some."""
        self._by_size: list[list[Case]] = []
        self._narrow: list[list[Case]] = []
        for counts in SIZES:
            many = counts is SMALL
            ops = REDUCE_OPS if many else ("sum", "mean")
            names = tuple(values.LARGEST_INTEGERS) if many else ("float32", "bfloat16")
            kinds = [(count, op, dtype) for count in counts for op in ops for dtype in names]
            self._by_size.append([Case.of(world_size, *kind) for kind in kinds])
            self._narrow.append(
                [Case.of(world_size, *kind, narrow=True) for kind in kinds if kind[2] == "float32"]
            )

    def pick(self, dice: random.Random, wire_dtype: str | None) -> Case:
        """One of them; most are small."""
        (size,) = dice.choices(range(len(SIZES)), HOW_OFTEN)
        return dice.choice((self._narrow if wire_dtype else self._by_size)[size])


class WrongResultError(Exception):
    """A collective ended well with a wrong result."""


class Round:
    """One round on one process."""

    def __init__(self, plan: Plan, process: int, cases: Cases, look: Callable[[int], None]) -> None:
        """Prepares the round.

        Args:
            plan: What to do.
            process: Who does it.
            cases: What to reduce.
            look: Called between batches with the number of collectives done.
        """
        self._plan, self._cases, self._look = plan, cases, look
        self._rank = plan.ranks[process]
        self._at_fault = process == plan.faulty
        self.done = self.steps = self.phase = 0

    def play(self, comm: Communicator) -> None:
        """Runs the batches, and strikes when it is time to."""
        plan = self._plan
        with tempfile.TemporaryDirectory(prefix="gradring-soak-") as directory:
            if plan.traced:
                comm.trace_start(Path(directory) / "trace.json", limit=1000)
            dice = random.Random(plan.seed)
            for number in range(plan.length):
                if self._at_fault and number == plan.fault_at:
                    strike(plan.fault, comm)
                batch = dice.choices(BATCHES, WEIGHTS)[0]
                self.done += batch(self, comm, dice)
                self._look(self.done)
            # A rank that only received a last broadcast would leave before it hears of a fault.
            comm.barrier()
            if plan.traced:
                comm.trace_stop()

    def forget(self) -> None:
        """Nothing is kept from one round to the next."""

    def asynchronous(self, comm: Communicator, dice: random.Random) -> int:
        """Several all-reduces under way at a time."""
        cases = [self._pick(dice) for _ in range(dice.randrange(1, DEPTH + 1))]
        works = [comm.all_reduce_async(self._source(case), case.op, name="a") for case in cases]
        for case, work in zip(cases, works, strict=True):
            check("all_reduce_async", work.wait(), case.expected)
        return len(cases)

    def blocking(self, comm: Communicator, dice: random.Random) -> int:
        """A few all-reduces, one after the other."""
        cases = [self._pick(dice) for _ in range(4)]
        for case in cases:
            check("all_reduce", comm.all_reduce(self._source(case), case.op), case.expected)
        return len(cases)

    def bucket(self, comm: Communicator, dice: random.Random) -> int:
        """Several arrays at once."""
        case = self._pick(dice)
        parts = comm.all_reduce([self._source(case) for _ in range(3)], case.op)
        for part in parts:
            check("bucket", part, case.expected)
        return 1

    def scatter(self, comm: Communicator, dice: random.Random) -> int:
        """Everybody gets a part."""
        case = self._pick(dice)
        own = np.array_split(case.expected, comm.world_size)[comm.rank]
        check("reduce_scatter", comm.reduce_scatter(self._source(case), case.op), own)
        return 1

    def gather(self, comm: Communicator, dice: random.Random) -> int:
        """Parts of different lengths come together."""
        case = self._pick(dice)
        cut = [source[: source.size // (rank + 1)] for rank, source in enumerate(case.sources)]
        check("all_gather", comm.all_gather(cut[comm.rank]), np.concatenate(cut))
        return 2  # the lengths travel first

    def divide(self, comm: Communicator, dice: random.Random) -> int:
        """Everybody has a part of any length for each."""
        case, cuts = self._pick(dice), comm.world_size - 1
        parts = [
            np.split(source, sorted(dice.randrange(source.size + 1) for _ in range(cuts)))
            for source in case.sources
        ]
        splits = [part.size for part in parts[comm.rank]]
        received, _ = comm.all_to_all(self._source(case), splits)
        check("all_to_all", received, np.concatenate([part[comm.rank] for part in parts]))
        return 2  # the splits travel first

    def broadcast(self, comm: Communicator, dice: random.Random) -> int:
        """One rank's array wins."""
        case, root = self._pick(dice), dice.randrange(comm.world_size)
        check("broadcast", comm.broadcast(self._source(case), root), case.sources[root])
        return 1

    def rooted(self, comm: Communicator, dice: random.Random) -> int:
        """One rank gets a result, all parts, or has the parts of all."""
        case, root = self._pick(dice), dice.randrange(comm.world_size)
        length = case.expected.size // comm.world_size
        sources = [source[: length * comm.world_size] for source in case.sources]
        works: list[Any] = [
            comm.reduce_async(self._source(case), case.op, root),
            comm.gather_async(sources[comm.rank].copy(), root),
            comm.scatter_async(sources[comm.rank].copy(), root),
        ]
        reduced, gathered, part = (work.wait() for work in works)
        if comm.rank == root:
            check("reduce", reduced, case.expected)
            check("gather", gathered, np.concatenate(sources))
        check("scatter", part, sources[root][length * comm.rank : length * (comm.rank + 1)])
        return len(works)

    def meet(self, comm: Communicator, dice: random.Random) -> int:
        """Nothing travels; one rank takes stock."""
        comm.barrier()
        if dice.randrange(comm.world_size) == comm.rank:
            comm.stats()
        return 1

    def _pick(self, dice: random.Random) -> Case:
        return self._cases.pick(dice, self._plan.options["wire_dtype"])

    def _source(self, case: Case) -> NDArray[Any]:
        source: NDArray[Any] = case.sources[self._rank].copy()
        return source


BATCHES = (
    *(Round.asynchronous, Round.blocking, Round.bucket, Round.scatter),
    *(Round.gather, Round.broadcast, Round.rooted, Round.meet, Round.divide),
)
WEIGHTS = (8, 4, 1, 1, 1, 1, 1, 1, 1)


def check(what: str, result: NDArray[Any], expected: NDArray[Any]) -> None:
    """Raises if a bit differs."""
    if result.tobytes() != expected.tobytes():
        wrong = values.count_wrong(result, expected)
        raise WrongResultError(f"{what} of {expected.dtype}[{expected.size}]: {wrong} wrong")


def strike(fault: str, comm: Communicator) -> None:
    """The fault of the round; with `plans.NONE`, nothing happens."""
    if fault == plans.ABORT:
        comm.abort("the soak wants it")
    if fault == plans.RAISED:
        with comm:
            raise PlannedError("the soak wants it")
    if fault == plans.CLOSED:
        comm.close()
    if fault == plans.MISMATCH:
        comm.all_reduce(np.zeros(3, np.int64), "max", name="what nobody else calls")
    if fault == plans.KILLED:
        os.kill(os.getpid(), signal.SIGKILL)


def expected_error(plan: Plan, process: int, error: Exception | None) -> str | None:
    """What is wrong with how the round has ended on this process; None if nothing is."""
    if plan.fault == plans.NONE:
        return None if error is None else f"failed without a fault: {error!r}"
    if process == plan.faulty and plan.fault in (plans.RAISED, plans.CLOSED):
        wanted = PlannedError if plan.fault == plans.RAISED else gradring.errors.AbortedError
        return None if isinstance(error, wanted) else f"did not fail as planned: {error!r}"
    if not isinstance(error, plans.SEEN[plan.fault]):
        return f"got {error!r} after {plan.fault}, not {plans.SEEN[plan.fault].__name__}"
    if error.rank != plan.blamed:
        return f"blames rank {error.rank} and not {plan.blamed}: {error}"
    return None
