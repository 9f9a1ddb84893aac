"""A process of a crew: plays one round after the other, and tells what it holds in between.

It asks on standard output, one line of JSON each, and is answered on standard input: see `Message`.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any, Protocol

import gradring
from gradring.errors import GradringError
from gradring.group.communicator import Communicator
from soak import collectives
from soak.belongings import Belongings, belongings, settled
from soak.collectives import Cases, PlannedError, expected_error
from soak.plan import Part, Plan

LOOK_EVERY_S = 1.0
TIMEOUT_S = 120.0
GO, STOP = "go", "stop"
LEAKED_BYTES = 4 << 20


@dataclass(frozen=True)
class Job:
    """What a process is told at its start."""

    part: Part
    seed: str
    process: int
    first: int
    """Number of its first round."""
    rendezvous: list[str]
    """By process: where it listens when it is rank 0."""
    token: str
    leaky: bool
    """Whether it leaks on purpose, to see whether that is noticed."""

    @classmethod
    def parse(cls, text: str) -> Job:
        """The job that `json.dumps(asdict(job))` has written."""
        fields = json.loads(text)
        return cls(**{**fields, "part": Part(**fields["part"])})


@dataclass(frozen=True)
class Message:
    """What a process tells.

    With ``within=False`` it is between two rounds, and waits for the answer `GO` or `STOP`.
    """

    round: int
    """The round that it is in, or would begin."""
    within: bool
    at_s: float
    """On the clock of all processes."""
    collectives: int
    """Done since its start."""
    steps: int
    """Training steps done since its start."""
    phase: int
    """Of the round: what is measured in one phase can be compared."""
    held: Belongings

    @classmethod
    def parse(cls, line: str) -> Message:
        """The message of one line."""
        fields = json.loads(line)
        return cls(**{**fields, "held": Belongings(**fields["held"])})


class Playable(Protocol):
    """A round of a kind."""

    done: int
    steps: int
    phase: int

    def play(self, comm: Communicator) -> None:
        """Does all of it."""

    def forget(self) -> None:
        """Drops what a library keeps of rounds that are over."""


class Member:
    """The state of the process."""

    def __init__(self, job: Job) -> None:
        """Prepares everything that all rounds share."""
        self._job = job
        self._usual: Belongings | None = None
        self._patient = True
        self._looked_at = time.monotonic()
        self._collectives = self._steps = 0
        self._leaked: list[Any] = []
        self._cases = None if job.part.trains else Cases(job.part.world_size)

    def run(self) -> None:
        """Plays rounds until it is told to stop."""
        for number in count(self._job.first):
            held = settled(self._usual if self._patient else None)
            if self._usual is None and number > self._job.first:
                # What is there after the first round has been imported or begun for good.
                self._usual = held
            elif self._usual is not None:
                # What did not end in its time is not waited for again.
                self._patient &= not held.exceeds(self._usual)
            self._tell(number, False, held)
            if sys.stdin.readline().strip() != GO:
                return
            self._play(Plan.of(self._job.part, self._job.seed, number), number)
            if self._job.leaky:
                self._leak()

    def _play(self, plan: Plan, number: int) -> None:
        played: Playable

        def look(_done: int) -> None:
            if time.monotonic() - self._looked_at > LOOK_EVERY_S:
                self._tell(number, True, belongings(), played)

        if self._cases is None:
            from soak import training

            played = training.Round(plan, self._job.process, look)
        else:
            played = collectives.Round(plan, self._job.process, self._cases, look)
        error: Exception | None = None
        comm = None
        try:
            comm = self._join(plan)
            played.play(comm)
        except (GradringError, PlannedError) as caught:
            error = _bare(caught)
        if comm is not None:
            comm.close()
        played.forget()
        self._collectives += played.done
        self._steps += played.steps
        problem = expected_error(plan, self._job.process, error)
        if problem is not None:
            raise AssertionError(f"round {number}, {plan}: {problem}")

    def _join(self, plan: Plan) -> Communicator:
        return gradring.init(
            rank=plan.ranks[self._job.process],
            world_size=self._job.part.world_size,
            rendezvous=self._job.rendezvous[plan.first],
            token=self._job.token,
            timeout=TIMEOUT_S,
            **plan.options,
        )

    def _tell(
        self, number: int, within: bool, held: Belongings, played: Playable | None = None
    ) -> None:
        self._looked_at = time.monotonic()
        done, steps, phase = (
            (played.done, played.steps, played.phase) if played is not None else (0, 0, 0)
        )
        message = Message(
            round=number,
            within=within,
            at_s=self._looked_at,
            collectives=self._collectives + done,
            steps=self._steps + steps,
            phase=phase,
            held=held,
        )
        print(json.dumps(asdict(message)), flush=True)

    def _leak(self) -> None:
        """One of each kind of thing, as a program with defects would."""
        self._leaked += [b"\1" * LEAKED_BYTES, os.open("/dev/null", os.O_RDONLY)]
        threading.Thread(target=threading.Event().wait, daemon=True).start()


def _bare(error: Exception) -> Exception:
    """The error without the frames, its own and its causes', which keep the communicator alive."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


if __name__ == "__main__":
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
    Member(Job.parse(sys.argv[1])).run()
