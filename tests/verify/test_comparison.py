"""Verdicts on trainings that are made up: without TensorFlow, and without processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gradring.config.words import PAGES
from gradring.records import trainings
from gradring.records.trainings import SKETCH, Facts, State, Step, Training, sketch
from gradring.tools.verify.comparison import compare
from gradring.tools.verify.verdict import verdict
from gradring_start import chance

RATE = 0.1


def training(
    steps: int = 4,
    *,
    factor: float = 1.0,
    noise: float = 1e-7,
    start: int = 0,
    sent: int | None = 100,
    gradients: tuple[float, float] = (1.0, 1.0),
    facts: Facts | None = None,
) -> Training:
    """A training of two variables, whose updates are multiplied by a factor."""
    first, errors = np.random.default_rng(start), np.random.default_rng()
    updates = np.random.default_rng(99).normal(size=(steps, 2, 16))
    weights = first.normal(size=(2, 16))
    found = []
    for number in range(steps):
        before = weights.copy()
        weights = weights + RATE * factor * updates[number]
        weights += noise * errors.normal(size=weights.shape)
        total = None if sent is None else sent * (number + 1)
        found.append(
            Step(
                *(0, "SGD", number, ["kernel", "bias"], list(gradients), total),
                before=list(before),
                after=list(weights.copy()),
            )
        )
    return Training(found, facts or Facts(compute=["float32"], numbers="a"))


def text_of(one: Training, *ranks: Training) -> tuple[bool | None, str]:
    is_equal, sentences = verdict(one, ranks)
    return is_equal, "\n".join(sentences)


def test_trainings_that_differ_by_rounding_are_equal() -> None:
    is_equal, text = text_of(training(), training(), training())
    assert is_equal
    assert text.startswith("4 steps, 2 variables: equal within ")
    assert text.endswith("(one process and 2 ranks)")


@pytest.mark.parametrize(
    ("factor", "cause"),
    [
        (2, "a mean of the program's own: each of 2 ranks"),
        (0.5, "a sum that is averaged: the gradient is divided by 2"),
        (1.3, "samples that each rank draws for itself, or a part of the step"),
    ],
)
def test_the_factor_of_an_update_is_found(factor: float, cause: str) -> None:
    is_equal, text = text_of(training(), *[training(factor=factor)] * 2)
    assert is_equal is False
    assert "first in step 1 (SGD, its step 1), in " in text
    assert f"the update of this step is {factor:g} times as large" in text
    assert f"likely cause: {cause}" in text


def test_ranks_that_send_nothing_train_alone_even_where_they_are_equal() -> None:
    silent = training()
    for step in silent.steps:
        step.sent = 5000  # of forming the group
    is_equal, text = text_of(training(), silent, silent)
    assert is_equal is False
    assert text.startswith("not trained together\n4 steps, 2 variables are equal within")
    assert "likely cause: the ranks sent each other nothing" in text
    said = "the optimizer 'adam' applies gradients: each of 2 ranks does all of this work by itself"
    silent.facts.warnings.append(said)
    assert "likely cause: a custom loop" in text_of(training(), silent, silent)[1]
    assert "in no group" in text_of(training(), *[training(sent=None)] * 2)[1]


def test_first_weights_that_differ_are_named_before_everything_else() -> None:
    is_equal, text = text_of(training(), *[training(start=1, factor=2)] * 2)
    assert is_equal is False
    assert "before step 1 (SGD, its step 1) already" in text
    assert "likely cause: the weights differ before the first step" in text


def test_ranks_are_compared_with_each_other() -> None:
    is_equal, text = text_of(training(), training(), training(), training(factor=1.1))
    assert is_equal is False
    assert "rank 2 and rank 0 differ among themselves" in text
    assert "rank 2 differs from rank 0 first in step 1" in text


def test_another_number_of_steps_is_named() -> None:
    is_equal, text = text_of(training(8), training(4), training(4))
    assert is_equal is False
    assert "one process did 8 steps, and the ranks did 4 and 4" in text
    assert "an epoch has another number of batches" in text


def test_layers_explain_what_no_factor_does() -> None:
    facts = Facts(layers=["BatchNormalization", "Dropout"], compute=["float32"])
    other = training(noise=1e-2)
    is_equal, text = text_of(training(facts=facts), other, other)
    assert is_equal is False
    assert "likely cause: BatchNormalization: each rank takes mean and variance" in text
    assert "random layers were switched off in both: Dropout" in text


def test_batches_that_grow_with_the_ranks_are_named() -> None:
    one, other = (
        training(noise=noise, facts=Facts(batches=[batch, 100]))
        for noise, batch in ((0, 32), (1e-2, 64))
    )
    is_equal, text = text_of(one, other, other)
    assert is_equal is False
    assert "likely cause: the program makes batches 2 times as large on 2 ranks" in text


def test_datasets_that_the_program_divides_are_named() -> None:
    one, other = (
        training(factor=factor, facts=Facts(batches=[8], shards=[shards]))
        for factor, shards in ((1, 1), (1.2, 2))
    )
    is_equal, text = text_of(one, other, other)
    assert is_equal is False
    assert "likely cause: the program divides its data by Dataset.shard(2, ...)" in text
    assert text.endswith(f"divide the batch size by 2 too\n{PAGES}/verify.md says more"), text


def test_variables_without_a_gradient_are_not_compared() -> None:
    one, other = (training(gradients=(1.0, 1e-9)) for _ in range(2))
    for step in other.steps:
        step.after[1] = -step.after[1]
    is_equal, text = text_of(one, other, other)
    assert is_equal
    assert "not compared: bias, whose gradients are rounding errors" in text


def with_states(made: Training, *, differs_after: int | None = None) -> Training:
    """A training with a moving mean, and with a frozen variable that differs by rounding."""
    draw = np.random.default_rng()
    for steps in range(len(made.steps) + 1):
        mean = np.full(3, 0.9**steps)
        if differs_after is not None and steps >= differs_after:
            mean[0] += 0.1
        frozen = np.ones(3) + 1e-8 * draw.normal(size=3)
        made.states.append(State(steps, ["moving_mean", "frozen"], [mean, frozen]))
    return made


def test_variables_that_no_optimizer_updates_are_compared() -> None:
    one, same, other = (with_states(training(), differs_after=it) for it in (None, None, 3))
    is_equal, text = text_of(one, same, same)
    assert is_equal and "compared too: 2 variables that no optimizer updates" in text
    is_equal, text = text_of(one, other, other)
    assert is_equal is False
    assert "rank 0 of 2 differs from one process after 3 steps in moving_mean, which no" in text
    assert "likely cause: a variable that a layer or a step assigns from its part" in text
    is_equal, text = text_of(one, same, other)
    assert is_equal is False and "rank 1 differs from rank 0 after 3 steps in moving_mean" in text


def test_a_moving_mean_behind_a_bias_without_a_gradient_is_not_compared() -> None:
    one, other = (
        with_states(training(gradients=(1.0, 1e-9)), differs_after=it) for it in (None, 2)
    )
    for step in other.steps:
        step.after[1] = -step.after[1]
    is_equal, text = text_of(one, other, other)
    assert is_equal and "not compared: bias and moving_mean" in text


def test_what_gradring_has_warned_of_is_the_cause() -> None:
    warned = "a loss is, as far as its graph tells, neither a mean nor a sum over samples, as of"
    other = training(noise=1e-2, facts=Facts(layers=["BatchNormalization"], warnings=[warned]))
    is_equal, text = text_of(training(), other, other)
    assert is_equal is False
    assert "likely cause: a loss of several samples together, such as of all pairs" in text
    assert text_of(training(), *[training(facts=Facts(warnings=[warned]))] * 2)[0] is True


def test_nothing_is_said_of_trainings_without_steps() -> None:
    empty = Training([], Facts())
    assert text_of(empty, training(), training())[0] is None
    assert "on rank 1, so" in text_of(training(), training(), empty)[1]
    still = training(factor=0, noise=0)
    is_equal, text = text_of(still, still, still)
    assert is_equal is None and "is a learning rate 0?" in text


def test_half_precision_rounds_more() -> None:
    half = Facts(compute=["float32", "float16"])
    other = training(factor=1.01)
    assert text_of(training(), other, other)[0] is False
    is_equal, text = text_of(training(facts=half), other, other)
    assert is_equal and "layers compute in float16" in text


def test_a_sketch_keeps_the_norm_of_a_difference() -> None:
    draw = np.random.default_rng(0)
    one, other = (draw.normal(size=(300, 70)) for _ in range(2))
    assert sketch(one).shape == (SKETCH,)
    kept = np.linalg.norm(sketch(one) - sketch(other))
    assert kept == pytest.approx(np.linalg.norm(one - other), rel=0.05)
    assert (sketch(one[0]) == one[0]).all()


def test_steps_are_read_as_they_were_written(tmp_path: Path) -> None:
    trainings.begin(tmp_path / "one", 7)
    assert trainings.limit_of(tmp_path / "one") == 7
    place = trainings.folder(tmp_path / "one", 0)
    place.mkdir()
    made = with_states(training())
    for index, step in enumerate(made.steps):
        trainings.write_step(place, index, step)
    for index, state in enumerate(made.states):
        trainings.write_state(place, index, state)
    trainings.write_facts(place, made.facts)
    (read,) = trainings.read(tmp_path / "one", 1)
    assert read.facts == made.facts
    found = compare(made, read, 1e-12)
    assert found.steps == 4 and found.is_equal and found.largest == 0 and found.others


@pytest.fixture
def numpy_as_before() -> Iterator[None]:
    source: Any = np.random.bit_generator
    state, randbits = np.random.get_state(), source.randbits
    yield
    np.random.set_state(state)
    source.randbits = randbits


@pytest.mark.usefixtures("numpy_as_before")
@pytest.mark.parametrize("is_shared", [False, True])
def test_numbers_of_numpy_are_those_of_the_rank_or_of_all(
    is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []
    for rank in ("0", "0", "1"):
        monkeypatch.setenv("GRADRING_RANK", rank)
        chance.begin(is_recorded=True, is_shared=is_shared)
        chance.seed_numpy(np)
        assert not chance.has_drawn(np)
        ours = np.random
        unseeded = (ours.RandomState(), ours.default_rng(), ours.default_rng())
        others = [ours.Generator(kind()) for kind in (ours.PCG64, ours.MT19937, ours.Philox)]
        drawn.append([ours.rand(), unseeded[0].rand(), *(it.random() for it in unseeded[1:])])
        drawn[-1] += [it.random() for it in others]
        assert chance.has_drawn(np)
    first, again, other = drawn
    assert first == again and len(set(first)) == len(first)
    assert first == other if is_shared else not set(first) & set(other)


def test_a_numpy_with_seeds_from_elsewhere_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(chance, "_seed", 1)
    source = SimpleNamespace(seed=lambda _: None, bit_generator=SimpleNamespace())
    chance.seed_numpy(SimpleNamespace(random=source, __version__="9.0"))  # type: ignore[arg-type]
    assert "numpy 9.0 takes seeds from where gradring does not know" in caplog.text


FORKS = """
import os
import numpy
from gradring_start import chance
chance.begin(is_recorded=True, is_shared=True)
chance.seed_numpy(numpy)
for _ in range(2):
    if os.fork() == 0:
        print(numpy.random.default_rng().random(), flush=True)
        os._exit(0)
    os.wait()
print(numpy.random.default_rng().random())
"""


def test_forks_draw_other_seeds() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKS], capture_output=True, text=True, check=True, timeout=60
    )
    assert len(set(done.stdout.split())) == 3
