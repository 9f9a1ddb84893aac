"""Training that goes on when processes are lost, leave or join."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradring
from elastic.training import (
    LIMIT_S,
    Plan,
    Seen,
    Trainee,
    check,
    join,
    outcomes_of,
    planned,
    run,
    train,
    weights_after,
)
from faults.actor import belongings
from faults.stage import Stage
from gradring import _native
from gradring.elastic import State
from gradring.errors import AbortedError, ConfigError, GradringError, MismatchError, RendezvousError
from gradring.ports import free_ports
from gradring.testing import run_ranks, simulated_hosts
from gradring.testing.network import why_unavailable
from waiting import wait_until

STEPS = 5
"""That a group does to show that it works."""
GROUPS = 50


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    (tmp_path / "stage").mkdir()
    return Stage(tmp_path / "stage")


def one_dies(trainee: Trainee) -> bool:
    return some_die(trainee, 1)


def the_first_dies(trainee: Trainee) -> bool:
    return some_die(trainee, 0)


def two_die(trainee: Trainee) -> bool:
    return some_die(trainee, 0, 3)


def some_die(trainee: Trainee, *victims: int) -> bool:
    if trainee.place in victims:
        # The loss of another one may come first.
        if trainee.state.step >= STEPS:
            trainee.die()
        return False
    return trainee.steps_here >= STEPS and trainee.comm.world_size == (
        trainee.plan.founders - len(victims)
    )


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize(
    ("act", "founders", "victims"),
    [(one_dies, 3, [1]), (the_first_dies, 2, [0]), (two_die, 5, [0, 3])],
)
def test_those_that_are_left_train_on(
    stage: Stage, act: Callable[[Trainee], bool], founders: int, victims: list[int], transport: str
) -> None:
    plan = planned(act, founders, settings={"transport": transport})
    outcomes = outcomes_of(plan, stage)
    assert [o.rank for o in outcomes if o.exit_code == -signal.SIGKILL] == victims
    for seen in check(plan, [o for o in outcomes if o.rank not in victims]):
        assert seen.groups[0] == (1, seen.groups[0].rank, founders, 0)
        assert seen.groups[-1].world_size == founders - len(victims)


def call(trainee: Trainee) -> None:
    """Lets those come that are to join."""
    if trainee.comm.rank == 0:
        trainee.stage.tell("come")


def one_joins(trainee: Trainee) -> bool:
    if trainee.comm.generation == 1 and trainee.state.step == STEPS:
        call(trainee)
    return trainee.comm.world_size == trainee.plan.founders + 1 and trainee.steps_here >= STEPS


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_who_joins_gets_the_state_and_the_others_lose_nothing(stage: Stage, transport: str) -> None:
    settings = {"transport": transport}
    plan = planned(one_joins, 2, settings=settings, elements=10_000, piece_bytes=5_000)
    *others, joiner = check(plan, outcomes_of(plan, stage, joiners=1), repeated=0)
    assert joiner.groups[0].step >= STEPS
    assert [group.world_size for seen in others for group in seen.groups] == [2, 3, 2, 3]


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


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


def test_a_group_that_has_lost_its_first_rank_takes_in_another_process(stage: Stage) -> None:
    plan = planned(replaced, 3)
    _, *others = outcomes_of(plan, stage, joiners=1)
    assert [seen.groups[-1].world_size for seen in check(plan, others)] == [3] * 3


def joined_again(trainee: Trainee) -> bool:
    if trainee.comm.generation == 1 and trainee.state.step == STEPS:
        call(trainee)
    return trainee.comm.generation > 2 and trainee.steps_here >= STEPS


@pytest.mark.parametrize(
    ("victim", "death"), [(3, "connecting"), (0, "connecting"), (3, "transfer"), (0, "transfer")]
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


def one_gets_sigterm(trainee: Trainee) -> bool:
    if trainee.comm.generation == 1 and trainee.state.step == STEPS and trainee.place == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return trainee.comm.generation == 2 and trainee.steps_here >= STEPS


def test_sigterm_ends_a_process_at_its_commit_and_the_others_lose_nothing(stage: Stage) -> None:
    plan = planned(one_gets_sigterm, 3)
    outcomes = outcomes_of(plan, stage)
    assert outcomes.pop(1).exit_code == 128 + signal.SIGTERM
    for seen in check(plan, outcomes, repeated=0):
        assert seen.groups[-1].step == STEPS + 1


def one_raises(trainee: Trainee) -> bool:
    if trainee.comm.generation == 1 and trainee.state.step == STEPS and trainee.place == 1:
        raise ValueError("of this process")
    return trainee.comm.generation == 2 and trainee.steps_here >= STEPS


def test_a_process_leaves_with_its_own_error_and_the_others_go_on(stage: Stage) -> None:
    plan = planned(one_raises, 3)
    outcomes = outcomes_of(plan, stage)
    error = outcomes.pop(1).exception
    assert isinstance(error, ValueError)
    assert str(error) == "of this process"
    assert any("ValueError: of this process" in outcome.output for outcome in outcomes)
    check(plan, outcomes)


def all_raise(trainee: Trainee) -> bool:
    if trainee.state.step == STEPS:
        raise ValueError(f"of process {trainee.place}")
    return False


def test_an_error_of_all_ends_each_with_its_own(stage: Stage) -> None:
    outcomes = outcomes_of(planned(all_raise, 3), stage)
    assert [str(outcome.exception) for outcome in outcomes] == [
        f"of process {place}" for place in range(3)
    ]


def always_aborts(trainee: Trainee) -> bool:
    if trainee.state.step == STEPS and trainee.place == 0:
        trainee.comm.abort("enough")
    return False


def test_a_program_that_always_fails_ends_after_ten_losses(stage: Stage) -> None:
    outcomes = outcomes_of(planned(always_aborts, 2), stage)
    for outcome in outcomes:
        assert isinstance(outcome.exception, AbortedError), outcome.details()
        assert "enough" in str(outcome.exception)


def too_few_are_left(trainee: Trainee) -> bool:
    if trainee.comm.generation == 1 and trainee.state.step == STEPS:
        call(trainee)
        if trainee.place == 1:
            trainee.die()
    return trainee.comm.generation > 1 and trainee.steps_here >= STEPS


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


def stopped_for_a_moment(trainee: Trainee) -> bool:
    if trainee.state.step == STEPS and trainee.place == 0:
        os.kill(trainee.pid(1), signal.SIGSTOP)
        time.sleep(1.0)
        os.kill(trainee.pid(1), signal.SIGCONT)
    return bool(trainee.state.step >= 2 * STEPS)


def test_a_process_that_is_stopped_for_a_moment_stays(stage: Stage) -> None:
    plan = planned(stopped_for_a_moment, 3)
    for seen in check(plan, outcomes_of(plan, stage), repeated=0):
        assert [group.generation for group in seen.groups] == [1]


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


def train_twice(plan: Plan, stage: Stage) -> list[Seen]:
    with join(plan, stage, int(os.environ["GRADRING_RANK"])) as comm:
        trainee = Trainee(plan, comm.rank, stage, comm, State(weights=np.zeros(10), step=0))
        found = []
        for _ in range(3):
            trainee.seen = Seen()
            run(trainee)
            comm.barrier()
            found.append(trainee.seen)
        return found


def test_a_communicator_that_was_trained_with_serves_on(stage: Stage) -> None:
    plan = planned(again, 3)
    for found in run_ranks(train_twice, 3, plan, stage):
        assert [seen.groups[0].step for seen in found] == [0, STEPS + 1, 2 * STEPS + 2]
        assert [len(seen.groups) for seen in found] == [1, 1, 1]
        assert found[-1].weights == weights_after(3 * STEPS + 3, 10)


def train_to_a_loss_at_the_end(plan: Plan, stage: Stage) -> Seen:
    """Process 2 dies when process 0 has heard that all have returned, and process 1 has not."""
    place = int(os.environ["GRADRING_RANK"])
    real = gradring.Communicator.all_reduce

    def all_reduce(self: Any, x: Any, op: str = "sum", *, name: str = "") -> Any:
        if name == "elastic/ended" and place == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(self, x, op, name=name)
        if name == "elastic/returned" and place == 1:
            real(self, x, op, name="elastic/ended")  # which fails
        return result

    gradring.Communicator.all_reduce = all_reduce  # type: ignore[method-assign]
    return train(plan, stage)


def test_a_loss_when_some_know_that_all_have_returned_takes_nothing_back(stage: Stage) -> None:
    plan = planned(again, 3, workers=(3, None))
    outcomes = run_ranks(train_to_a_loss_at_the_end, 3, plan, stage, check=False)
    assert outcomes[2].exit_code == -signal.SIGKILL
    for outcome in outcomes[:2]:
        assert outcome.ok, outcome.details()
        assert outcome.value.weights == weights_after(STEPS + 1, 10)
        assert [group.generation for group in outcome.value.groups] == [1]


def train_with_too_few(plan: Plan, stage: Stage) -> Seen:
    stage.tell("come")
    return train(plan, stage)


def test_a_job_that_begins_with_too_few_waits_for_others_to_join(stage: Stage) -> None:
    plan = planned(again, 2, workers=(3, None))
    for seen in check(plan, run_ranks(train_with_too_few, 3, plan, stage, check=False)):
        assert [group.world_size for group in seen.groups] == [3]


def call_wrongly(plan: Plan, stage: Stage) -> list[str]:
    with join(plan, stage, 0) as comm:
        calls: list[Callable[[], object]] = [
            lambda: gradring.elastic.run(None),  # type: ignore[arg-type]
            lambda: gradring.elastic.run(comm, min_workers="2"),  # type: ignore[arg-type]
            lambda: gradring.elastic.run(comm, min_workers=3, max_workers=2),
            lambda: gradring.elastic.run(comm, timeout="1"),  # type: ignore[arg-type]
            lambda: gradring.elastic.run(comm)(lambda _: None)({}),
            lambda: gradring.elastic.run(comm)(gradring.elastic.run(comm)(lambda _: None))(State()),
        ]
        said = []
        for call in calls:
            with pytest.raises(ConfigError) as caught:
                call()
            said.append(str(caught.value))
        return said


def test_what_cannot_be_an_elastic_function_is_refused_before_anything_happens(
    stage: Stage,
) -> None:
    (said,) = run_ranks(call_wrongly, 1, planned(again, 1), stage)
    words = ["no group", "'2' is not", "not between", "'1' is not", "got dict", "under way already"]
    assert [word in text for word, text in zip(words, said, strict=True)] == [True] * 6, said


def train_for_unequal_times(plan: Plan, stage: Stage) -> None:
    place = int(os.environ["GRADRING_RANK"])
    with join(plan, stage, place) as comm:

        @gradring.elastic.run(comm)
        def elastic(state: State) -> None:
            while state.step < STEPS + place:
                comm.all_reduce(np.zeros(3), name="gradients")
                state.step += 1
                state.commit()

        elastic(State(step=0))


def test_a_process_whose_training_ends_before_the_others_is_named_by_all(stage: Stage) -> None:
    plan = planned(again, 2)
    for outcome in run_ranks(train_for_unequal_times, 2, plan, stage, check=False):
        assert isinstance(outcome.exception, MismatchError), outcome.details()
        assert "'elastic/returned' int64[] (rank 0)" in str(outcome.exception)


def pooled(trainee: Trainee) -> bool:
    if trainee.state.step == STEPS and trainee.place == 1:
        with multiprocessing.get_context("fork").Pool(2) as pool:
            trainee.memory["squares"] = pool.map(abs, [-1, 2])
        if (child := os.fork()) == 0:
            sys.exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    return bool(trainee.state.step >= 2 * STEPS)


def test_pools_and_forks_of_a_process_end_and_do_not_leave_in_its_name(stage: Stage) -> None:
    plan = planned(pooled, 3)
    for seen in check(plan, outcomes_of(plan, stage), repeated=0):
        assert [group.generation for group in seen.groups] == [1]


def killed_with_a_fork(trainee: Trainee) -> bool:
    if trainee.comm.generation == 1 and trainee.state.step == STEPS and trainee.place == 1:
        if os.fork() == 0:
            os.setsid()
            with contextlib.suppress(TimeoutError):
                trainee.stage.wait("gone-0")
            os._exit(0)
        trainee.die()
    if trainee.comm.generation == 2 and trainee.steps_here == STEPS:
        trainee.stage.tell(f"gone-{trainee.place}")
    return trainee.comm.generation == 2 and trainee.steps_here >= STEPS


def test_a_fork_does_not_keep_the_address_of_a_process_that_was_killed(stage: Stage) -> None:
    plan = planned(killed_with_a_fork, 3)
    outcomes = outcomes_of(plan, stage)
    del outcomes[1]
    check(plan, outcomes)


def many_groups(trainee: Trainee) -> bool:
    if trainee.comm.rank == 0 and trainee.steps_here == 1 and trainee.comm.generation <= GROUPS:
        trainee.comm.abort("another group")
    return trainee.comm.generation > GROUPS


def train_in_many_groups(plan: Plan, stage: Stage) -> dict[int, dict[str, int]]:
    with join(plan, stage, int(os.environ["GRADRING_RANK"])) as comm:
        trainee = Trainee(plan, comm.rank, stage, comm, State(weights=np.zeros(10), step=0))
        before = belongings()
        run(trainee)
        assert len(trainee.seen.groups) > GROUPS
        return {0: before, 1: belongings()}


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_many_groups_leave_nothing_behind(stage: Stage, transport: str) -> None:
    plan = planned(many_groups, 2, settings={"transport": transport})
    for found in run_ranks(train_in_many_groups, 2, plan, stage):
        grown = {n: (found[0].get(n, 0), c) for n, c in found[1].items() if c > found[0].get(n, 0)}
        # Names of threads have 15 characters.
        assert set(grown) <= {"gradring-member", "socket"}, grown
        assert all(after - before <= 2 for before, after in grown.values()), grown


def closed_by_itself(trainee: Trainee) -> bool:
    if trainee.comm.generation == 1 and trainee.state.step == STEPS:
        if trainee.place == 1:
            trainee.die()
        threading.Timer(1.0, trainee.comm.close).start()
    return False


def interrupted(trainee: Trainee) -> bool:
    if trainee.comm.generation == 1 and trainee.state.step == STEPS:
        if trainee.place == 1:
            trainee.die()
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    return False


@pytest.mark.parametrize(
    ("act", "error"), [(closed_by_itself, AbortedError), (interrupted, KeyboardInterrupt)]
)
def test_a_process_that_waits_for_others_can_be_ended(
    stage: Stage, act: Callable[[Trainee], bool], error: type[BaseException]
) -> None:
    survivor, _ = outcomes_of(planned(act, 2, workers=(2, None)), stage)
    assert isinstance(survivor.exception, error), survivor.details()


def some_die_recorded(trainee: Trainee) -> bool:
    if trainee.comm.generation == 1 and trainee.state.step == STEPS and trainee.place == 1:
        trainee.die()
    if trainee.comm.generation == 2 and trainee.steps_here == STEPS and trainee.comm.rank == 1:
        trainee.die()
    return trainee.comm.generation == 3 and trainee.steps_here >= STEPS


def test_each_group_that_fails_leaves_its_records_and_the_last_one_its_timeline(
    stage: Stage, tmp_path: Path
) -> None:
    env = {
        "GRADRING_FLIGHT_DIR": str(tmp_path / "flight"),
        "GRADRING_TRACE": str(tmp_path / "trace.json"),
    }
    plan = planned(some_die_recorded, 3)
    survivor, *_ = outcomes_of(plan, stage, env=env)
    (seen,) = check(plan, [survivor])
    assert [group.generation for group in seen.groups] == [1, 2, 3]
    for size, place in ((3, tmp_path / "flight"), (2, tmp_path / "flight" / "generation-2")):
        record = json.loads((place / "rank-0.json").read_text())
        assert record["world_size"] == size
    part = json.loads((tmp_path / "trace.json.parts" / "rank-0.json").read_text())
    assert part["world_size"] == 1


def goes_on_without(trainee: Trainee) -> bool:
    if trainee.state.step == STEPS:
        call(trainee)
    return trainee.stage.told("ended-2") is not None


def test_a_joiner_with_another_token_is_told_why_and_disturbs_nobody(stage: Stage) -> None:
    settings, joiners = {"token": "right"}, {"token": "wrong"}
    plan = planned(goes_on_without, 2, settings=settings, joiners=joiners)
    *others, joiner = outcomes_of(plan, stage, joiners=1)
    check(plan, others, repeated=0)
    assert isinstance(joiner.exception, RendezvousError), joiner.details()
    assert "does not let this process join" in str(joiner.exception)
    assert "different tokens" in str(joiner.exception)


def saved(trainee: Trainee) -> bool:
    if trainee.state.step == 2 * STEPS + 1:
        trainee.state.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    return bool(trainee.state.step >= 3 * STEPS)


def train_with_checkpoints(plan: Plan, stage: Stage, directory: str) -> Seen:
    with join(plan, stage, int(os.environ["GRADRING_RANK"])) as comm:
        state = State(weights=np.zeros(10), step=0)
        if comm.rank == 1:
            # The files of the host of rank 0 are gone, so it begins with the other's.
            directory += "-copy"
        state.checkpoint_to(directory, every_commits=STEPS)
        trainee = Trainee(plan, comm.rank, stage, comm, state)
        run(trainee)
        state.flush()
        return trainee.seen


def test_a_job_of_which_all_died_goes_on_from_its_checkpoint(stage: Stage, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    plan = planned(saved, 2)
    given = (stage, str(directory))
    outcomes = run_ranks(train_with_checkpoints, 2, plan, *given, check=False)
    assert -signal.SIGKILL in [outcome.exit_code for outcome in outcomes]
    shutil.rmtree(f"{directory}-copy")
    directory.rename(f"{directory}-copy")
    plan = planned(again, 2)
    for seen in run_ranks(train_with_checkpoints, 2, plan, *given):
        assert seen.groups[0].step == 2 * STEPS
        assert seen.weights == weights_after(3 * STEPS + 1, 10)


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
        found = list(comm._joins)
    os.kill(int(stage.told("pid-0") or 0), signal.SIGINT)
    return found


def test_a_process_that_only_waits_to_join_is_taken_for_no_job(stage: Stage) -> None:
    assert run_ranks(look_for_a_job, 2, planned(again, 2), stage) == [[], []]


def found_or_join(trainee: Trainee) -> bool:
    if trainee.comm.generation == 1 and trainee.state.step == STEPS and trainee.place == 1:
        trainee.die()
    return trainee.comm.generation == 3 and trainee.steps_here >= STEPS


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
    assert [group.world_size for group in first.groups] == [2, 1, 2]
    assert [group.world_size for group in second.groups] == [2]


def cut_off(trainee: Trainee) -> bool:
    if trainee.comm.generation == 1 and trainee.state.step == STEPS:
        trainee.stage.tell(f"cut-{trainee.place}")
        trainee.stage.wait("struck")
    return trainee.comm.generation > 1 and trainee.steps_here >= STEPS


@pytest.mark.slow
@pytest.mark.skipif(why_unavailable() is not None, reason="needs network namespaces")
def test_of_a_network_that_is_cut_the_larger_part_goes_on(stage: Stage) -> None:
    with simulated_hosts(5) as hosts:
        places = tuple(f"{host.address}:29500" for host in hosts)
        plan = Plan(cut_off, 5, places, settings={"transport": "tcp"})

        def cut() -> None:
            stage.wait(*(f"cut-{place}" for place in range(5)))
            for host in (hosts[0], hosts[3]):
                host.cut()
            stage.tell("struck")

        director = threading.Thread(target=cut)
        director.start()
        outcomes = outcomes_of(plan, stage, hosts=hosts)
        director.join()
    for place in (3, 0):
        lost = outcomes.pop(place).exception
        assert isinstance(lost, RendezvousError), lost
        assert "cannot be more than half of generation 1" in str(lost)
    for seen in check(plan, outcomes):
        assert seen.groups[-1].world_size == 3
