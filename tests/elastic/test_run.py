"""Training that goes on when processes are lost or leave; `test_join.py` has those that join."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradring
from elastic.training import (
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
from faults.actor import belongings, leaks
from faults.stage import Stage
from gradring.elastic import State
from gradring.errors import AbortedError, ConfigError, MismatchError, RendezvousError
from gradring.group.communicator import core_of
from gradring.testing import Outcome, run_ranks, simulated_hosts
from support.pairs import Pair, on_threads
from support.waiting import wait_until

STEPS = 5
"""That a group does to show that it works."""
GROUPS = 50
SHM = pytest.param("shm", marks=pytest.mark.slow)
"""What is elastic does not depend on what moves the bytes."""


def some_die(trainee: Trainee, victims: Sequence[int]) -> bool:
    if trainee.place in victims:
        # The loss of another one may come first.
        if trainee.state.step >= STEPS:
            trainee.die()
        return False
    return trainee.steps_here >= STEPS and trainee.comm.world_size == (
        trainee.plan.founders - len(victims)
    )


@pytest.mark.parametrize("transport", ["tcp", SHM])
@pytest.mark.parametrize(
    ("founders", "victims"),
    [(3, [1]), (2, [0]), pytest.param(5, [0, 3], marks=pytest.mark.slow)],
    ids=["one dies", "the first dies", "two die"],
)
def test_those_that_are_left_train_on(
    stage: Stage, founders: int, victims: list[int], transport: str
) -> None:
    act = functools.partial(some_die, victims=victims)
    plan = planned(act, founders, settings={"transport": transport})
    outcomes = outcomes_of(plan, stage)
    assert [o.rank for o in outcomes if o.exit_code == -signal.SIGKILL] == victims
    for outcome in outcomes:
        if outcome.rank not in victims:
            assert_said(outcome, r"goes back to its last commit, and .*: rank \d on \S+: its ")
            # The advice is for a job that ends.
            assert "restart the job" not in outcome.output
    for seen in check(plan, [o for o in outcomes if o.rank not in victims]):
        assert seen.groups[0] == (1, seen.groups[0].rank, founders, 0)
        assert seen.groups[-1].world_size == founders - len(victims)


def one_gets_sigterm(trainee: Trainee) -> bool:
    if trainee.comm.generation == 1 and trainee.state.step == STEPS and trainee.place == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return trainee.comm.generation == 2 and trainee.steps_here >= STEPS


def test_sigterm_ends_a_process_at_its_commit_and_the_others_lose_nothing(stage: Stage) -> None:
    plan = planned(one_gets_sigterm, 3)
    outcomes = outcomes_of(plan, stage)
    for outcome in outcomes:
        assert_said(outcome, r"leaves its group for a new one: rank 1 on \S+ has got SIGTERM, and")
    assert outcomes.pop(1).exit_code == 128 + signal.SIGTERM
    for seen in check(plan, outcomes, repeated=0):
        assert seen.groups[-1].step == STEPS + 1


def assert_said(outcome: Outcome, why: str) -> None:
    """Its log says why its group has ended."""
    assert re.search(rf"rank \d on \S+ {why}", outcome.output), outcome.output


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


def calls_before_it_tells_why(trainee: Trainee) -> bool:
    if trainee.state.step == STEPS and trainee.place == 0:
        trainee.call_others()
        time.sleep(0.1)
        trainee.comm.abort("enough")
    return False


def calls_and_does_not_tell_why(trainee: Trainee) -> bool:
    if trainee.comm.generation == 1 and trainee.state.step == STEPS and trainee.place == 0:
        trainee.call_others()
        wait_until(lambda: core_of(trainee.comm).has_failed, "the others leave the group")
    return trainee.comm.generation > 1 and trainee.steps_here >= STEPS


def test_who_called_to_a_new_group_is_named_if_nobody_tells_why(stage: Stage) -> None:
    plan = planned(calls_and_does_not_tell_why, 2)
    outcomes = outcomes_of(plan, stage)
    check(plan, outcomes)
    for outcome in outcomes:
        assert_said(outcome, r"goes back to .*: rank 0 at 127\.0\.0\.1:\d+ forms a new group")


@pytest.mark.slow
def test_a_process_hears_the_cause_also_after_the_call_to_a_new_group(stage: Stage) -> None:
    for outcome in outcomes_of(planned(calls_before_it_tells_why, 2), stage):
        assert isinstance(outcome.exception, AbortedError), outcome.details()
        assert "enough" in str(outcome.exception)


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


@pytest.mark.slow
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

    def all_reduce(self: Any, x: Any, op: gradring.ReduceOp = "sum", *, name: str = "") -> Any:
        if name == "elastic/ended" and place == 2:
            stage.wait("heard")
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(self, x, op, name=name)
        if name == "elastic/returned" and place == 0:
            stage.tell("heard")
        if name == "elastic/returned" and place == 1:
            real(self, x, op, name="elastic/ended")  # which fails
        return result

    gradring.Communicator.all_reduce = all_reduce  # type: ignore[method-assign]
    return train(plan, stage)


@pytest.mark.slow
def test_a_loss_when_some_know_that_all_have_returned_takes_nothing_back(stage: Stage) -> None:
    plan = planned(again, 3, workers=(3, None))
    outcomes = run_ranks(train_to_a_loss_at_the_end, 3, plan, stage, check=False)
    assert outcomes[2].exit_code == -signal.SIGKILL
    for outcome in outcomes[:2]:
        assert outcome.ok, outcome.details()
        assert outcome.value.weights == weights_after(STEPS + 1, 10)
        assert [group.generation for group in outcome.value.groups] == [1]


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


def test_a_group_that_has_failed_says_so_when_it_is_to_be_elastic() -> None:
    with Pair() as pair:
        pair.peer.abort("has had enough")
        with pytest.raises(AbortedError, match="has had enough"):
            gradring.elastic.run(pair.comm)(lambda _: None)(State(step=0))


@pytest.fixture
def terminated() -> Iterator[list[int]]:
    """How often the program's own handler of SIGTERM has been called."""
    called: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda signum, _: called.append(signum))
    handler = signal.getsignal(signal.SIGTERM)
    yield called
    assert signal.getsignal(signal.SIGTERM) == handler, "the program has its own back"
    signal.signal(signal.SIGTERM, before)


def test_sigterm_is_the_programs_too_and_ends_it_at_its_next_commit(terminated: list[int]) -> None:
    state = State(step=0)
    with gradring.init() as comm:

        @gradring.elastic.run(comm)
        def train(state: State) -> None:
            while True:
                state.step += 1
                if state.step == STEPS:
                    signal.raise_signal(signal.SIGTERM)
                    assert terminated == [signal.SIGTERM]
                state.commit()

        with pytest.raises(SystemExit) as left:
            train(state)
    assert left.value.code == 128 + signal.SIGTERM
    assert state.step == STEPS, "that commit is its last"


def test_sigterm_ends_a_process_at_once_that_waits_for_others(terminated: list[int]) -> None:
    class WhileItWaits(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "waits for others to join its first group" in record.getMessage():
                signal.raise_signal(signal.SIGTERM)

    log, handler = logging.getLogger("gradring"), WhileItWaits()
    log.addHandler(handler)
    try:
        with gradring.init() as comm, pytest.raises(SystemExit) as left:
            gradring.elastic.run(comm, min_workers=2)(lambda _: None)(State())
    finally:
        log.removeHandler(handler)
    assert left.value.code == 128 + signal.SIGTERM
    assert terminated == [signal.SIGTERM]


def test_threads_train_too_and_leave_signals_to_the_program(
    terminated: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    real = gradring.Communicator.all_reduce

    def all_reduce(self: Any, x: Any, op: gradring.ReduceOp = "sum", *, name: str = "") -> Any:
        if name == "elastic/ended" and self.rank == 1:
            self.abort("when all have returned")
        return real(self, x, op, name=name)

    monkeypatch.setattr(gradring.Communicator, "all_reduce", all_reduce)

    def trained(comm: gradring.Communicator) -> float:
        @gradring.elastic.run(comm, min_workers=2)
        def train(state: State) -> float:
            assert signal.getsignal(signal.SIGTERM) == handler
            while state.step < STEPS:
                state.weight += comm.all_reduce(comm.rank + 1.0)
                state.step += 1
                state.commit()
            return float(state.weight)

        return float(train(State(weight=0.0, step=0)))

    # Who hears of a loss after that takes nothing back.
    assert on_threads(2, trained) == [3.0 * STEPS] * 2
    assert terminated == []


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_fork_does_not_keep_the_address_of_a_process_that_was_killed(stage: Stage) -> None:
    plan = planned(killed_with_a_fork, 3)
    outcomes = outcomes_of(plan, stage)
    del outcomes[1]
    check(plan, outcomes)


def many_groups(trainee: Trainee) -> bool:
    if trainee.comm.rank == 0 and trainee.steps_here == 1 and trainee.comm.generation <= GROUPS:
        trainee.comm.abort("another group")
    return trainee.comm.generation > GROUPS


def train_in_many_groups(plan: Plan, stage: Stage) -> list[str]:
    with join(plan, stage, int(os.environ["GRADRING_RANK"])) as comm:
        trainee = Trainee(plan, comm.rank, stage, comm, State(weights=np.zeros(10), step=0))
        # A thread names itself when it first runs; names have 15 characters.
        threads = {"gradring-engine", "gradring-monito", "gradring-listen"}
        wait_until(lambda: threads <= set(belongings()), "the group's threads run")
        before = belongings()
        run(trainee)
        assert len(trainee.seen.groups) > GROUPS
        return leaks(before, {"gradring-member": 2, "socket": 2})


@pytest.mark.parametrize("transport", [pytest.param("tcp", marks=pytest.mark.slow), "shm"])
def test_many_groups_leave_nothing_behind(stage: Stage, transport: str) -> None:
    plan = planned(many_groups, 2, settings={"transport": transport})
    assert run_ranks(train_in_many_groups, 2, plan, stage) == [[], []]


def close(trainee: Trainee) -> None:
    trainee.comm.close()


def interrupt(_: Trainee) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def ended_while_it_waits(trainee: Trainee, end: Callable[[Trainee], None]) -> bool:
    if trainee.comm.generation == 1 and trainee.state.step == STEPS:
        if trainee.place == 1:
            trainee.die()
        threading.Timer(1.0, end, (trainee,)).start()
    return False


@pytest.mark.parametrize(
    ("end", "error"),
    [pytest.param(close, AbortedError, marks=pytest.mark.slow), (interrupt, KeyboardInterrupt)],
)
def test_a_process_that_waits_for_others_can_be_ended(
    stage: Stage, end: Callable[[Trainee], None], error: type[BaseException]
) -> None:
    act = functools.partial(ended_while_it_waits, end=end)
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


def cut_off(trainee: Trainee) -> bool:
    if trainee.comm.generation == 1 and trainee.state.step == STEPS:
        trainee.stage.tell(f"cut-{trainee.place}")
        trainee.stage.wait("struck")
    return trainee.comm.generation > 1 and trainee.steps_here >= STEPS


@pytest.mark.slow
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
