"""Numbers of workers that differ among the processes of an elastic job, and who is told so."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from elastic.training import Plan, Seen, Trainee, check, planned, train
from faults.stage import Stage
from gradring.errors import MismatchError
from gradring.testing import run_ranks

STEPS = 5


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
