"""Every way of training x optimizer x model: two workers against one process without a strategy."""

import itertools
from typing import Any

import pytest

from gradring.testing import run_ranks
from support.chosen import chosen
from support.keras_models import (
    CAN_FIT,
    MODELS,
    OPTIMIZERS,
    assert_trained_alike,
    needs_fit,
    strategy_of,
    train_by_fit,
    train_by_loop,
)
from support.tf_worker import join

CASES = [
    *itertools.product(("fit", "loop"), OPTIMIZERS, MODELS),
    *itertools.product(("loop-eager",), ("SGD momentum", "Adam"), ("mlp",)),
]
#: In every run of the tests: each way, each optimizer and each model; loops are traced sooner.
QUICK = (
    ("fit", "AdamW", "mixed precision"),
    ("loop-eager", "Adam", "mlp"),
    ("loop", "SGD momentum", "mlp"),
    ("loop", "SGD momentum", "synchronised BN"),
    ("loop", "Adam", "embedding"),
)

#: Of float32 weights, after twelve steps.
TOLERANCE = 1e-5
#: A float16 layer rounds the sum over a batch; the sum over two halves rounds elsewhere.
FLOAT16_TOLERANCE = 2e-4


def train_all(cases: list[tuple[str, str, str]]) -> Any:
    import keras
    import tensorflow as tf

    results = {}
    with join() as comm:
        for way, optimizer, kind in cases:
            if way == "fit" and not CAN_FIT:
                continue
            keras.backend.clear_session()
            # Different seeds: only the chief's initial values may count.
            keras.utils.set_random_seed(comm.rank + 1)
            train = train_by_fit if way == "fit" else train_by_loop
            tf.config.run_functions_eagerly(way == "loop-eager")
            results[way, optimizer, kind] = train(strategy_of(comm), kind, optimizer)
    return results


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest) -> Any:
    cases = chosen(request, "case")
    workers = run_ranks(train_all, 2, cases, timeout=240)
    (alone,) = run_ranks(train_all, 1, cases, timeout=240)
    return workers, alone


def marks_of(case: tuple[str, str, str]) -> list[pytest.MarkDecorator]:
    fit = [needs_fit] if case[0] == "fit" else []
    return fit if case in QUICK else [*fit, pytest.mark.slow]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=marks_of(case)) for case in CASES], ids="-".join
)
def test_two_workers_of_different_seeds_train_as_one_process(
    trained: Any, case: tuple[str, str, str]
) -> None:
    workers, alone = trained
    tolerance = FLOAT16_TOLERANCE if "mixed precision" in case else TOLERANCE
    assert_trained_alike([worker[case] for worker in workers], alone[case], tolerance)
