"""Processes that join an elastic training, or come back to it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gradring
from elastic.training import (
    LIMIT_S,
    Job,
    Plan,
    Seen,
    Trainee,
    check,
    outcomes_of,
    planned,
    run,
    train,
)
from faults.stage import Stage
from gradring import _native
from gradring.elastic import State
from gradring.errors import GradringError, MismatchError, RendezvousError
from gradring.group.communicator import open_groups
from gradring.group.require_equal import require_equal
from gradring.machine.ports import free_ports
from gradring.testing import run_ranks
from support.proc import has_ipv6
from support.waiting import wait_until

STEPS = 5
"""That a group does to show that it works."""


def call(trainee: Trainee) -> None:
    """Lets those come that are to join."""
    if trainee.comm.rank == 0:
        trainee.stage.tell("come")


def one_joins(trainee: Trainee) -> bool:
    if trainee.comm.generation == 1 and trainee.state.step == STEPS:
        call(trainee)
    return trainee.comm.world_size == trainee.plan.founders + 1 and trainee.steps_here >= STEPS


@pytest.mark.parametrize("transport", [pytest.param("tcp", marks=pytest.mark.slow), "shm"])
def test_who_joins_gets_the_state_and_the_others_lose_nothing(stage: Stage, transport: str) -> None:
    settings = {"transport": transport}
    plan = planned(one_joins, 2, settings=settings, elements=10_000, piece_bytes=5_000)
    outcomes = outcomes_of(plan, stage, joiners=1)
    *others, joiner = check(plan, outcomes, repeated=0)
    for outcome in outcomes[:2]:
        why = (
            r"leaves its group for a new one: rank \d on \S+ says that 127\.0\.0\.1:\d+ would join"
        )
        assert re.search(why, outcome.output), outcome.output
    assert joiner.groups[0].step >= STEPS
    assert [group.world_size for seen in others for group in seen.groups] == [2, 3, 2, 3]


@pytest.mark.slow
@pytest.mark.skipif(not has_ipv6(), reason="this system has no ::1")
def test_a_job_that_listens_at_ipv6_only_is_joined(stage: Stage) -> None:
    plan = Plan(one_joins, 2, tuple(f"[::1]:{port}" for port in free_ports(2, "::1")))
    for seen in check(plan, outcomes_of(plan, stage, joiners=1), repeated=0):
        assert seen.groups[-1].world_size == 3


def replaced(trainee: Trainee) -> bool:
    if trainee.comm.generation == 1 and trainee.state.step == STEPS and trainee.place == 0:
        trainee.die()
    if trainee.comm.generation == 2:
        call(trainee)
    return trainee.comm.generation == 3 and trainee.steps_here >= STEPS


@pytest.mark.slow
def test_a_group_that_has_lost_its_first_rank_takes_in_another_process(stage: Stage) -> None:
    plan = planned(replaced, 3)
    _, *others = outcomes_of(plan, stage, joiners=1)
    assert [seen.groups[-1].world_size for seen in check(plan, others)] == [3] * 3


def joined_again(trainee: Trainee) -> bool:
    if trainee.comm.generation == 1 and trainee.state.step == STEPS:
        call(trainee)
    # The others may form a group without the joiner at first; then it comes a little later.
    is_whole = trainee.comm.generation > 2 and trainee.comm.world_size == trainee.plan.founders
    return is_whole and trainee.steps_here >= STEPS


@pytest.mark.parametrize(
    ("victim", "death"),
    [
        pytest.param(3, "connecting", marks=pytest.mark.slow),
        (0, "connecting"),
        (3, "transfer"),
        pytest.param(0, "transfer", marks=pytest.mark.slow),
    ],
)
def test_a_death_before_a_joiner_has_the_state_takes_nothing_back(
    stage: Stage, victim: int, death: str
) -> None:
    plan = planned(joined_again, 3, elements=10_000, piece_bytes=1_000, victim=victim, death=death)
    outcomes = outcomes_of(plan, stage, joiners=1)
    assert outcomes[victim].exit_code == -signal.SIGKILL
    del outcomes[victim]
    for seen in check(plan, outcomes, repeated=0):
        assert seen.groups[-1].world_size == 3


def too_few_are_left(trainee: Trainee) -> bool:
    if trainee.comm.generation == 1 and trainee.state.step == STEPS:
        call(trainee)
        if trainee.place == 1:
            trainee.die()
    return trainee.comm.generation > 1 and trainee.steps_here >= STEPS


@pytest.mark.slow
def test_too_few_wait_for_one_that_joins(stage: Stage) -> None:
    plan = planned(too_few_are_left, 2, workers=(2, None))
    survivor, _, joiner = outcomes_of(plan, stage, joiners=1)
    for seen in check(plan, [survivor, joiner]):
        assert seen.groups[-1].world_size == 2


def one_waits_for_room(trainee: Trainee) -> bool:
    if trainee.comm.generation == 1:
        if trainee.state.step == STEPS:
            call(trainee)
        if trainee.place == 1:
            trainee.memory["waited"] = trainee.memory.get("waited", 0) + (trainee.waiting > 0)
            if trainee.memory["waited"] > STEPS:
                trainee.die()
    return (
        trainee.comm.generation > 1 and trainee.comm.world_size == 2 and trainee.steps_here > STEPS
    )


def test_a_further_one_waits_until_there_is_room(stage: Stage) -> None:
    plan = planned(one_waits_for_room, 2, workers=(1, 2))
    survivor, _, joiner = outcomes_of(plan, stage, joiners=1)
    first, second = check(plan, [survivor, joiner])
    assert first.groups[1].step > 2 * STEPS
    assert second.groups[-1].world_size == 2


def stopped_for_long(trainee: Trainee) -> bool:
    if trainee.comm.generation == 1 and trainee.state.step == STEPS and trainee.place == 0:
        os.kill(trainee.pid(1), signal.SIGSTOP)
    if trainee.place == 0 and trainee.comm.world_size == 2 and trainee.steps_here == STEPS:
        os.kill(trainee.pid(1), signal.SIGCONT)
    return trainee.comm.generation > 2 and trainee.comm.world_size == 3


@pytest.mark.slow
def test_a_process_that_was_stopped_for_long_comes_back_to_the_others_state(stage: Stage) -> None:
    plan = planned(stopped_for_long, 3)
    found = check(plan, outcomes_of(plan, stage))
    assert [group.world_size for group in found[0].groups] == [3, 2, 3]
    # It was left out, and knows nothing of the group between.
    assert [group.world_size for group in found[1].groups] == [3, 3]


def stopped_until_all_is_over(trainee: Trainee) -> bool:
    if trainee.comm.generation == 1 and trainee.state.step == STEPS and trainee.place == 0:
        os.kill(trainee.pid(1), signal.SIGSTOP)
        trainee.stage.tell("stopped")
    return trainee.comm.generation > 1 and trainee.steps_here >= STEPS


@pytest.mark.slow
def test_a_process_that_comes_back_when_all_others_have_ended_goes_on_alone(stage: Stage) -> None:
    plan = planned(stopped_until_all_is_over, 3)

    def wake() -> None:
        stage.wait("stopped", "ended-0", "ended-2", within_s=LIMIT_S)
        os.kill(int(stage.told("pid-1") or 0), signal.SIGCONT)

    director = threading.Thread(target=wake)
    director.start()
    first, stopped, last = outcomes_of(plan, stage)
    director.join()
    assert [seen.groups[-1].world_size for seen in check(plan, [first, last])] == [2, 2]
    (alone,) = check(plan, [stopped])
    assert [group.world_size for group in alone.groups] == [3, 1]


def again(trainee: Trainee) -> bool:
    return trainee.steps_here >= STEPS


def train_with_too_few(plan: Plan, stage: Stage) -> Seen:
    stage.tell("come")
    return train(plan, stage)


def test_a_job_that_begins_with_too_few_waits_for_others_to_join(stage: Stage) -> None:
    plan = planned(again, 2, workers=(3, None))
    for seen in check(plan, run_ranks(train_with_too_few, 3, plan, stage, check=False)):
        assert [group.world_size for group in seen.groups] == [3]


def goes_on_without(trainee: Trainee) -> bool:
    if trainee.state.step == STEPS:
        call(trainee)
    return trainee.stage.told("ended-2") is not None


@pytest.mark.slow
def test_a_joiner_with_another_token_is_told_why_and_disturbs_nobody(stage: Stage) -> None:
    settings, joiners = {"token": "right"}, {"token": "wrong"}
    plan = planned(goes_on_without, 2, settings=settings, joiners=joiners)
    *others, joiner = outcomes_of(plan, stage, joiners=1)
    check(plan, others, repeated=0)
    assert isinstance(joiner.exception, RendezvousError), joiner.details()
    assert "does not let this process join" in str(joiner.exception)
    assert "different tokens" in str(joiner.exception)


def one_does_something_else(trainee: Trainee) -> bool:
    call(trainee)
    if trainee.place == 2:
        trainee.comm.broadcast(np.zeros(3), name="what the others have made")
    return trainee.stage.told("ended-2") is not None and trainee.steps_here >= STEPS


def one_does_something_else_after_its_first_commit(trainee: Trainee) -> bool:
    """As where a commit is the first thing that the function does."""
    if trainee.steps_here == 0:
        trainee.state.commit()
    return one_does_something_else(trainee)


def one_does_something_else_where_others_commit(trainee: Trainee) -> bool:
    real = State.commit

    def commit(self: State) -> None:
        trainee.comm.broadcast(np.zeros(3), name="what the others have made")
        real(self)

    call(trainee)
    if trainee.place == 2:
        State.commit = commit  # type: ignore[method-assign]
    return trainee.stage.told("ended-2") is not None and trainee.steps_here >= STEPS


def one_has_something_else(trainee: Trainee) -> bool:
    """All are told so, by what is no failure of the group."""
    call(trainee)
    what = "what the others have made" if trainee.place == 2 else "nothing"
    require_equal(trainee.comm, {"what": f"called broadcast(root=0) {what!r}"})
    return trainee.stage.told("ended-2") is not None and trainee.steps_here >= STEPS


@pytest.mark.parametrize(
    "act",
    [
        one_does_something_else,
        one_does_something_else_after_its_first_commit,
        one_does_something_else_where_others_commit,
        one_has_something_else,
    ],
)
def test_one_that_joins_and_does_something_else_ends_alone(
    stage: Stage, act: Callable[[Trainee], bool]
) -> None:
    plan = planned(act, 2)
    *others, joiner = outcomes_of(plan, stage, joiners=1)
    assert isinstance(joiner.exception, MismatchError), joiner.details()
    assert "has joined, and its first steps differ from those of the others" in str(
        joiner.exception
    )
    assert "called broadcast(root=0) 'what the others have made'" in joiner.exception.problem
    # What it called stands beside what the others called.
    assert re.search(r"; the others called |, and rank 0 \S+ \S+ has ", joiner.exception.problem)
    assert "make every rank call" not in str(joiner.exception)
    assert joiner.exception.advice.startswith("create lasting objects")
    for seen in check(plan, others, repeated=0):
        assert [group.world_size for group in seen.groups][-2:] == [3, 2]


def look_for_a_job(plan: Plan, stage: Stage) -> list[str]:
    """Process 0 waits to join a job that there is not; process 1 finds it, and looks on."""
    where, nowhere = plan.addresses
    if os.environ["GRADRING_RANK"] == "0":
        stage.tell("pid-0", os.getpid())
        with gradring.init(join=[nowhere], listen=where) as comm:
            trainee = Trainee(plan, 0, stage, comm, State(weights=np.zeros(10), step=0))
            with pytest.raises(KeyboardInterrupt):
                run(trainee)
        return []
    stage.wait("pid-0")
    while True:
        with contextlib.suppress(GradringError):
            _native.inquire(where, os.environ["GRADRING_TOKEN"].encode(), None, 5.0)
            break
    with gradring.init(rank=0, world_size=1, join=["auto", where]) as comm:
        found = list(open_groups.yet_to_join(comm))
    os.kill(int(stage.told("pid-0") or 0), signal.SIGINT)
    return found


def test_a_process_that_only_waits_to_join_is_taken_for_no_job(stage: Stage) -> None:
    assert run_ranks(look_for_a_job, 2, planned(again, 2), stage) == [[], []]


def one_looks_on_while_the_others_form(trainee: Trainee) -> bool:
    """Process 1 enters the next group once process 0 waits there for it, and says what it saw."""
    if trainee.place == 1 and "real" not in trainee.memory:
        real = trainee.memory["real"] = Job.agreed
        first, token = trainee.plan.addresses[0], os.environ["GRADRING_TOKEN"].encode()

        def agreed(*given: Any) -> None:
            wait_until(
                lambda: _native.inquire(first, token, None, 5.0).get("missing") == [1],
                "process 0 waits for this one",
            )
            trainee.stage.tell("runs", float(_native.inquire(first, token, None, 5.0)["runs"]))
            real(*given)

        Job.agreed = agreed
    if trainee.place == 2 and trainee.state.step == STEPS:
        trainee.die()
    return trainee.comm.generation == 2 and trainee.steps_here >= STEPS


@pytest.mark.slow
def test_a_job_that_forms_its_next_group_runs(stage: Stage) -> None:
    """Who would find it or else found a job must not found one."""
    plan = planned(one_looks_on_while_the_others_form, 3)
    check(plan, outcomes_of(plan, stage)[:2])
    assert stage.told("runs") == 1


def found_or_join(trainee: Trainee) -> bool:
    if trainee.comm.generation == 1 and trainee.state.step == STEPS and trainee.place == 1:
        trainee.die()
    is_whole = trainee.comm.generation > 1 and trainee.comm.world_size == 2
    return is_whole and trainee.steps_here >= STEPS


def listens(address: str) -> bool:
    """Whether connections are accepted there."""
    host, _, port = address.rpartition(":")
    with socket.socket() as stream:
        return stream.connect_ex((host, int(port))) == 0


def train_anyhow(plan: Plan, stage: Stage) -> Seen:
    """The third process is rank 1 once more; all are started alike."""
    place = int(os.environ["GRADRING_RANK"])
    if place == 2:
        stage.wait("struck")
        wait_until(lambda: not listens(plan.addresses[1]), "the process that was there is gone")
    own = 1 if place else 0
    cluster = {"worker": list(plan.addresses)}
    os.environ["TF_CONFIG"] = json.dumps(
        {"cluster": cluster, "task": {"type": "worker", "index": own}}
    )
    for name in ("GRADRING_RANK", "GRADRING_WORLD_SIZE", "GRADRING_RENDEZVOUS"):
        del os.environ[name]
    with gradring.init(join="auto") as comm:
        trainee = Trainee(plan, place, stage, comm, State(weights=np.zeros(10), step=0))
        run(trainee)
        return trainee.seen


def test_processes_that_are_started_alike_found_a_job_or_join_it(stage: Stage) -> None:
    plan = planned(found_or_join, 2)
    survivor, _, joiner = run_ranks(train_anyhow, 3, plan, stage, check=False)
    first, second = check(plan, [survivor, joiner])
    # The new one may come while the survivor still looks for others.
    assert [group.world_size for group in first.groups] in ([2, 1, 2], [2, 2])
    assert [group.world_size for group in second.groups] == [2]
