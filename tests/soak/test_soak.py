"""A short soak on real processes, without TensorFlow; `make soak` runs the long one."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from soak import verdict
from soak.crew import Crew, Life, Story
from soak.plan import Part

SECONDS, QUICK_SECONDS = 24.0, 12.0
SECONDS_MAX = 240.0
"""On a machine with much else to do, it takes longer until there is enough to judge."""
BOUND_KIB = 60.0 * 1024
"""Per minute. Wide: in seconds, an allocator is not yet warm."""


@pytest.fixture(autouse=True)
def processes(pytestconfig: pytest.Config) -> None:
    """The crew starts them in threads, where no test can end."""
    if pytestconfig.getoption("--in-one-process"):
        pytest.skip("starts processes")


def run(part: Part, logs: Path, seconds: float = SECONDS, *, leaky: bool = False) -> Story:
    """What was told until it was enough to judge.

    The rounds that were under way then still have to end well, but their measurements do not count:
    they would move the middle of the time, and there may be too few on one of its sides again.
    """
    crew = Crew(part, "tests", SECONDS_MAX, logs, leaky)
    begin = time.monotonic()
    told = crew.story
    for _ in crew.run():
        if told is crew.story and time.monotonic() - begin > seconds:
            until_now = replace(told, lives=[Life(o.process, [*o.messages]) for o in told.lives])
            if verdict.judged(until_now):
                told = until_now
                crew.finish()
    return told


@pytest.mark.parametrize(
    ("world_size", "seconds"),
    [
        (2, QUICK_SECONDS),
        *(pytest.param(size, SECONDS, marks=pytest.mark.slow) for size in (2, 4)),
    ],
)
def test_groups_that_fail_and_form_again_leave_nothing_behind(
    world_size: int, seconds: float, tmp_path: Path
) -> None:
    story = run(Part(f"{world_size} ranks", world_size, longest=60), tmp_path, seconds)
    assert verdict.problems(story, BOUND_KIB) == []
    assert len(story.lives) > world_size, "no process was killed"
    collectives, _ = story.done()
    assert collectives > 500


@pytest.mark.slow
def test_what_leaks_is_named(tmp_path: Path) -> None:
    problems = "\n".join(
        verdict.problems(run(Part("leaky", 2, longest=40), tmp_path, leaky=True), BOUND_KIB)
    )
    assert "process 0: resident memory grows by" in problems
    assert " descriptors in round " in problems
    assert " threads in round " in problems
