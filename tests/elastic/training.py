"""An elastic training whose values are known to the last bit, whoever is lost or joins.

Each process calls ``plan.act`` before each of its steps. That may end the process, and tells
whether it has seen enough; the training ends when all have.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import numpy as np

import gradring
from faults.stage import Stage
from gradring.elastic import State
from gradring.elastic import commit as commits
from gradring.elastic.job import _Job
from gradring.group.communicator import core_of
from gradring.machine.ports import free_ports
from gradring.testing import Host, Outcome, run_ranks

#: A job's loop, of which drills replace a method.
Job: Any = _Job
LIMIT_S = 180.0
PIECES_BEFORE_DEATH = 40
RATE = 0.001


@dataclass(frozen=True)
class Plan:
    """What the processes of one training do.

    Attributes:
        act: What each does before each step.
        founders: Those of the first group; any more join when ``come`` is told.
        addresses: Where each of the founders is found.
        workers: ``min_workers`` and ``max_workers``.
        elements: Of the weights, of 8 bytes.
        piece_bytes: Of what travels to joiners.
        settings: More arguments of `gradring.init`.
        joiners: The same, for those that join.
        victim: Who dies inside gradring.
        death: When; a name of `DEATHS`.
        listens: Where each of the founders listens, if something stands between.
        at_end: What each does when it has trained to the end.
        timeout: Of `gradring.elastic.run`.
    """

    act: Callable[[Trainee], bool]
    founders: int
    addresses: tuple[str, ...]
    workers: tuple[int, int | None] = (1, None)
    elements: int = 10
    piece_bytes: int = commits.PIECE_BYTES
    settings: Mapping[str, Any] = field(default_factory=dict)
    joiners: Mapping[str, Any] = field(default_factory=dict)
    victim: int | None = None
    death: str = ""
    listens: tuple[str, ...] = ()
    at_end: Callable[[Trainee], None] | None = None
    timeout: float = 600.0


class Group(NamedTuple):
    """A group that a process has been in, and the step with which it began there."""

    generation: int
    rank: int
    world_size: int
    step: int


@dataclass
class Seen:
    """What a process has seen."""

    weights: list[float] = field(default_factory=list)
    step: int = 0
    groups: list[Group] = field(default_factory=list)
    repeated: int = 0
    """The most steps that it has done again at once."""
    times: dict[int, tuple[float, float]] = field(default_factory=dict)
    """By generation: when its first step ended and when its last one began, on all clocks alike."""


@dataclass
class Trainee:
    """One process, as `Plan.act` sees it."""

    plan: Plan
    place: int
    stage: Stage
    comm: gradring.Communicator
    state: State
    seen: Seen = field(default_factory=Seen)
    memory: dict[str, Any] = field(default_factory=dict)
    """Of ``act``."""

    @property
    def steps_here(self) -> int:
        """How many steps it has done in its present group."""
        return int(self.state.step) - self.seen.groups[-1].step

    @property
    def participant(self) -> Any:
        """It in the consensus on groups."""
        job = self.state._after_commit.__self__  # type: ignore[union-attr]
        return job._participant

    @property
    def waiting(self) -> int:
        """How many processes this one knows that would join."""
        return len(self.participant.joiners)

    def call_others(self) -> None:
        """Forms a new group, as the others see it; that it leaves its own they are not told."""

        class Told(Exception):
            pass

        class Progress:
            def left(self) -> None:
                raise Told

        with contextlib.suppress(Told):
            self.participant.next_group(core_of(gradring.Communicator(0, 1)), Progress(), False)

    def die(self) -> NoReturn:
        """Is killed."""
        self.stage.tell("struck", time.monotonic())
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("it lives")

    def pid(self, place: int) -> int:
        """That of another process."""
        self.stage.wait(f"pid-{place}")
        return int(self.stage.told(f"pid-{place}") or 0)


def addresses(count: int) -> tuple[str, ...]:
    """Free ones of this host."""
    return tuple(f"127.0.0.1:{port}" for port in free_ports(count))


def planned(act: Callable[[Trainee], bool], founders: int, **given: Any) -> Plan:
    """A plan on this host."""
    return Plan(act, founders, addresses(founders), **given)


def train(plan: Plan, stage: Stage) -> Seen:
    """What each process runs."""
    place = int(os.environ["GRADRING_RANK"])
    stage.tell(f"pid-{place}", os.getpid())
    try:
        return take_part(plan, stage, place)
    finally:
        stage.tell(f"ended-{place}")
        if all(stage.told(f"ended-{founder}") is not None for founder in range(plan.founders)):
            # Nobody is left to call those that would join.
            stage.tell("over")


def take_part(plan: Plan, stage: Stage, place: int) -> Seen:
    """Joins, and trains."""
    commits.PIECE_BYTES = plan.piece_bytes
    with join(plan, stage, place) as comm:
        state = State(weights=np.zeros(plan.elements), step=0)
        trainee = Trainee(plan, place, stage, comm, state)
        if place == plan.victim:
            DEATHS[plan.death](trainee)
        run(trainee)
        if plan.at_end is not None:
            plan.at_end(trainee)
        return trainee.seen


def at_each_loss(tell: Callable[[], None]) -> None:
    """Has it called whenever this process goes back to its last commit."""
    real = State.restore

    def restore(self: State) -> None:
        tell()
        real(self)

    State.restore = restore  # type: ignore[method-assign]


def die_while_connecting(trainee: Trainee) -> None:
    """Is killed once it has agreed on a group with others."""
    Job.agreed = lambda *_: trainee.die()


def die_in_the_transfer(trainee: Trainee) -> None:
    """Is killed when pieces have travelled to a joiner."""
    real, pieces = gradring.Communicator.broadcast, itertools.count()

    def broadcast(self: Any, x: Any, root: int = 0, *, name: str = "") -> Any:
        if name == "elastic/piece" and next(pieces) == PIECES_BEFORE_DEATH:
            trainee.die()
        return real(self, x, root, name=name)

    gradring.Communicator.broadcast = broadcast  # type: ignore[method-assign]


DEATHS = {"connecting": die_while_connecting, "transfer": die_in_the_transfer}


def join(plan: Plan, stage: Stage, place: int) -> gradring.Communicator:
    """Comes into the first group, or is to join it."""
    if place >= plan.founders:
        stage.wait("come", within_s=LIMIT_S)
        return gradring.init(**{"join": plan.addresses, **plan.settings, **plan.joiners})
    listens = plan.listens or plan.addresses
    return gradring.init(
        rank=place,
        world_size=plan.founders,
        rendezvous=plan.addresses[0] if place else listens[0],
        listen=listens[place],
        announce=plan.addresses[place],
        **plan.settings,
    )


def run(trainee: Trainee) -> None:
    """Trains until all have seen enough."""
    comm, seen, place = trainee.comm, trainee.seen, trainee.place
    least, most = trainee.plan.workers

    patience = trainee.plan.timeout

    @gradring.elastic.run(comm, min_workers=least, max_workers=most, timeout=patience)
    def elastic(state: State) -> None:
        if seen.groups:
            seen.repeated = max(seen.repeated, seen.step - state.step)
        seen.step = state.step
        seen.groups.append(Group(comm.generation, comm.rank, comm.world_size, state.step))
        while True:
            enough = np.array([trainee.plan.act(trainee)], np.uint8)
            began = time.monotonic()
            gradient = np.full(trainee.plan.elements, float(state.step))
            state.weights -= RATE * comm.all_reduce(gradient, "mean")
            state.step += 1
            seen.step = state.step
            enough = comm.all_reduce(enough, "min")
            ended = time.monotonic()
            trainee.stage.tell(f"step-{place}-{comm.generation}", ended)
            seen.times[comm.generation] = (seen.times.get(comm.generation, (ended,))[0], began)
            state.commit()
            if enough[0]:
                return

    elastic(trainee.state)
    seen.weights = trainee.state.weights.tolist()


def weights_after(steps: int, elements: int) -> list[float]:
    """What one process alone would have."""
    weights = np.zeros(elements)
    for step in range(steps):
        weights -= RATE * np.full(elements, float(step))
    return [float(weight) for weight in weights]


def outcomes_of(
    plan: Plan,
    stage: Stage,
    joiners: int = 0,
    *,
    hosts: Sequence[Host] = (),
    env: Mapping[str, str] | None = None,
    limit_s: float = LIMIT_S,
) -> list[Outcome]:
    """Runs it; one outcome for each process, the founders first."""
    count = plan.founders + joiners
    try:
        return run_ranks(
            train, count, plan, stage, timeout=limit_s, check=False, hosts=hosts, env=env
        )
    finally:
        stage.tell("over")


def check(
    plan: Plan,
    outcomes: Iterable[Outcome],
    *,
    repeated: int = 1,
    absent: frozenset[int] = frozenset(),
) -> list[Seen]:
    """What those saw that trained to the end, which is what they should have.

    Ranks that are ``absent`` have ended since.
    """
    found: list[Seen] = []
    for outcome in outcomes:
        assert outcome.ok, f"{outcome.summary()}\n{outcome.details()}"
        found.append(outcome.value)
    for seen in found:
        assert seen.step == found[0].step
        assert seen.weights == weights_after(seen.step, plan.elements)
        assert seen.repeated <= repeated
        generations = [group.generation for group in seen.groups]
        assert generations == sorted(set(generations))
        assert seen.groups[-1][2:] == found[0].groups[-1][2:], [each.groups for each in found]
    last = [seen.groups[-1] for seen in found]
    assert {group.rank for group in last} == set(range(last[0].world_size)) - absent
    assert len({group.rank for group in last}) == len(last)
    return found
