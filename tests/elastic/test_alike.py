"""Values that all ranks have to have in common, and who is told that they differ."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from elastic.training import Plan, Seen, Trainee, check, planned, train
from faults.stage import Stage
from gradring import Communicator
from gradring.elastic.alike import Standing, compare
from gradring.errors import MismatchError
from gradring.testing import run_ranks
from pairs import on_threads

STEPS = 5


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def goes_on_without_the_last(trainee: Trainee) -> bool:
    if trainee.comm.rank == 0 and trainee.state.step == STEPS:
        trainee.stage.tell("come")
    return trainee.stage.told("ended-2") is not None


def train_as_others_do_not(plan: Plan, stage: Stage, other: int, least: int) -> Seen:
    """One of the processes wants more workers."""
    if int(os.environ["GRADRING_RANK"]) == other:
        plan = replace(plan, workers=(least, 8))
    return train(plan, stage)


def test_founders_with_different_numbers_of_workers_are_all_told(stage: Stage) -> None:
    plan = planned(goes_on_without_the_last, 3, workers=(1, 8))
    for outcome in run_ranks(train_as_others_do_not, 3, plan, stage, 1, 2, check=False):
        error = outcome.exception
        assert isinstance(error, MismatchError), outcome.details()
        assert "rank 1 on" in str(error)
        assert "has min_workers=2, and rank 0 on" in str(error)
        assert error.rank == 1


@pytest.mark.parametrize("least", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_a_joiner_with_another_number_of_workers_is_told_and_the_others_lose_nothing(
    stage: Stage, least: int
) -> None:
    plan = planned(goes_on_without_the_last, 2, workers=(1, 8))
    *others, joiner = run_ranks(train_as_others_do_not, 3, plan, stage, 2, least, check=False)
    check(plan, others, repeated=0)
    assert isinstance(joiner.exception, MismatchError), joiner.details()
    assert f"has min_workers={least}, and rank 0 on" in str(joiner.exception)


@pytest.mark.parametrize(
    ("standings", "of_job"),
    [((2, 2, 2), [0, 1, 2]), ((0, 2, 1), [1]), ((1, 0, 1), [0, 2]), ((1, 1, 1), [0, 1, 2])],
)
def test_the_word_of_those_counts_that_have_been_in_the_job_for_longest(
    standings: tuple[int, int, int], of_job: list[int]
) -> None:
    def compared(comm: Communicator) -> list[int] | str:
        counts = comm.rank in of_job
        try:
            return compare(comm, {"x": str(counts)}, Standing(standings[comm.rank]))
        except MismatchError as error:
            return str(error)

    for rank, told in enumerate(on_threads(3, compared)):
        if rank in of_job:
            assert told == of_job
        else:
            assert f"rank {rank} on" in str(told) and f"and rank {of_job[0]} on" in str(told)
