"""The verdict of the soak, on made-up measurements."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from soak import churn, verdict
from soak.belongings import Belongings
from soak.crew import Life, Story
from soak.member import Message
from soak.plan import Part

BOUND_KIB = 500.0
MESSAGES = 200
FLAT = Belongings(resident_kib=100_000, descriptors=12, threads=4, mappings=0, half_closed=0)


def told(hold: Callable[[int], Belongings]) -> Story:
    """A part of 200 rounds of two seconds, whose first process holds what ``hold`` says."""
    messages = [
        Message(
            round=n + 1, within=False, at_s=2.0 * n, collectives=0, steps=0, phase=0, held=hold(n)
        )
        for n in range(MESSAGES)
    ]
    return Story(Part("made up", 2), [Life(0, messages), Life(1, [])])


def test_noise_and_jumps_at_the_start_are_flat() -> None:
    dice = random.Random(1)

    def hold(number: int) -> Belongings:
        noise = dice.randrange(4000) + (50_000 if dice.random() < 0.1 else 0)
        kib = 100_000 + noise if number > 40 else 1000 * number
        return replace(FLAT, resident_kib=kib, descriptors=12 if number > 3 else number)

    assert verdict.problems(told(hold), BOUND_KIB) == []


def test_memory_that_grows_is_found_in_noise_of_many_times_its_rate() -> None:
    dice = random.Random(2)

    def hold(number: int) -> Belongings:
        return replace(FLAT, resident_kib=100_000 + 30 * number + dice.randrange(2000))

    (problem,) = verdict.problems(told(hold), BOUND_KIB)
    assert "made up, process 0: resident memory grows by " in problem
    assert verdict.slope(verdict.between(told(hold).lives[0])) == pytest.approx(900, rel=0.2)


@pytest.mark.parametrize("at", [60, 100, 140])
def test_one_jump_is_no_growth(at: int) -> None:
    def hold(number: int) -> Belongings:
        return replace(FLAT, resident_kib=100_000 + (3000 if number >= at else 0))

    assert verdict.problems(told(hold), BOUND_KIB) == []


@pytest.mark.parametrize("what", ["descriptors", "threads", "mappings", "half_closed"])
def test_one_more_of_what_is_counted_is_named(what: str) -> None:
    def hold(number: int) -> Belongings:
        more = {what: getattr(FLAT, what) + 1} if number >= 150 else {}
        return replace(FLAT, **more)

    before = getattr(FLAT, what)
    words = what.replace("_", " ")
    problems = verdict.problems(told(hold), BOUND_KIB)
    assert f"made up, process 0: {before} {words} in round 52, {before + 1} in 151" in problems


def test_too_few_measurements_are_no_proof() -> None:
    story = told(lambda _: FLAT)
    del story.lives[0].messages[5:]
    (problem,) = verdict.problems(story, BOUND_KIB)
    assert "too few measurements" in problem


def test_many_short_rounds_and_one_that_lasts_are_no_proof() -> None:
    """Memory fills at the start of a group: in a round that lasts, that looks like growth."""
    series = [
        [in_round(n, 10.0 * n + second, 100_000 + 1000 * second) for second in range(length)]
        for n, length in enumerate([2, 2, 2, 2, 2, 5])
    ]
    assert verdict.slope(series) is None


def in_round(number: int, at_s: float, kib: int) -> Message:
    held = replace(FLAT, resident_kib=kib)
    return Message(number, within=True, at_s=at_s, collectives=0, steps=0, phase=0, held=held)


def churned(hold: Callable[[int], dict[str, int]], generations: int = 200) -> list[str]:
    """The verdict on a process of so many generations, whose TensorFlow starts as it does."""
    dice = random.Random(3)
    start = [min(n, 9) for n in range(generations)]
    return churn.grown(
        [
            {
                "memory_kib": 700_000 + 3000 * start[n] + dice.randrange(4000),
                "threads": 30 + start[n] // 2 + dice.randrange(5),
                "descriptors": 40,
            }
            | hold(n)
            for n in range(generations)
        ]
    )


def test_the_start_of_tensorflow_and_threads_that_come_and_go_are_no_leak() -> None:
    assert churned(lambda n: {}) == []


@pytest.mark.parametrize("what", ["descriptors", "threads"])
def test_one_more_in_ten_generations_is_a_leak(what: str) -> None:
    dice = random.Random(4)
    (problem,) = churned(lambda n: {what: 30 + n // 10 + dice.randrange(5)})
    assert problem.startswith(f"{what} grew by 0.")


def test_a_mib_in_each_generation_is_a_leak() -> None:
    dice = random.Random(5)
    (problem,) = churned(lambda n: {"memory_kib": 700_000 + 1024 * n + dice.randrange(9000)})
    assert problem.startswith("memory_kib grew by 1")


def test_few_generations_are_no_proof() -> None:
    (problem,) = churned(lambda n: {}, generations=20)
    assert "20 generations are too few" in problem
