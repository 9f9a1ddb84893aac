"""The verdict whether what the processes hold has stayed flat."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import groupby

from soak.belongings import Belongings
from soak.crew import Life, Story
from soak.member import Message
from soak.plan import Part

WARM_UP = 0.25
"""Share of a series that is not judged: allocators, caches and records fill in it."""
APART_S = 3.0
"""Two measurements that are nearer to each other tell noise and no slope."""
ENOUGH = 5
"""Pairs of measurements that a slope needs, in each half of the time."""

BETWEEN, WITHIN = "between rounds", "in rounds"
"""Where measurements are taken."""

Series = Sequence[Message]
Points = Sequence[tuple[float, float]]
"""When, and how much."""


@dataclass(frozen=True)
class Figures:
    """What one process held, after its warm-up."""

    part: str
    process: int
    series: list[Series]
    """What is comparable: measurements at the same point of the cycle."""
    slope: float | None
    """Of resident memory in KiB per minute; None if there is too little to tell, where it is not
    judged, and for the process that is killed now and then: it is never warm."""

    @property
    def messages(self) -> list[Message]:
        """All measurements, in order."""
        return [message for one in self.series for message in one]


def between(life: Life) -> list[Series]:
    """The measurements between rounds, of which the first is from before the first round."""
    return _warm([[message for message in life.messages if not message.within][1:]])


def within(life: Life) -> list[Series]:
    """The measurements in each phase of each round."""
    inside = [message for message in life.messages if message.within]
    return _warm([list(one) for _, one in groupby(inside, lambda m: (m.round, m.phase))])


def _warm(series: list[Series]) -> list[Series]:
    warm = [[m for m in one if m.at_s >= _warm_from(one)] for one in series if one]
    return [one for one in warm if len(one) > 1]


def _warm_from(series: Series) -> float:
    first, last = series[0].at_s, series[-1].at_s
    return first + WARM_UP * (last - first)


def slope(series: Sequence[Series]) -> float | None:
    """Growth of resident memory in KiB per minute that goes on; pairs are of the same series."""
    points = [[(m.at_s, float(m.held.resident_kib)) for m in one] for one in series]
    found = growth(points, APART_S)
    return None if found is None else 60.0 * found


def growth(series: Sequence[Points], apart: float) -> float | None:
    """Growth per unit that goes on: the less of the slopes of two halves.

    In each half it is the median over all pairs of points that are so far apart, the estimator of
    H. Theil (1950) and P. K. Sen (1968), which a quarter of arbitrary values does not move. What an
    allocator takes once, however late, is growth in one half only.
    """
    places = [x for one in series for x, _ in one]
    middle = (min(places) + max(places)) / 2 if places else 0.0
    halves = [
        [[point for point in one if (point[0] < middle) == early] for one in series]
        for early in (True, False)
    ]
    slopes = [_median_slope(half, apart) for half in halves]
    known = [slope for slope in slopes if slope is not None]
    return min(known) if len(known) == len(halves) else None


def _median_slope(series: Sequence[Points], apart: float) -> float | None:
    slopes = [
        (later - earlier) / (x - before)
        for one in series
        for place, (x, later) in enumerate(one)
        for before, earlier in one[:place]
        if x - before >= apart
    ]
    return statistics.median(slopes) if len(slopes) >= ENOUGH else None


def judged_places(part: Part) -> tuple[str, ...]:
    """Where memory has to stay flat.

    TensorFlow keeps something of every function that it has traced, so memory grows with every
    model under any strategy; in a round, nothing is traced any more once it is warm.
    """
    if part.trains:
        return (WITHIN,) if part.steady else ()
    return BETWEEN, WITHIN


def figures(story: Story) -> list[Figures]:
    """One for each process, from the longest of its lives, and for each place of measuring."""
    found = []
    for process in range(story.part.world_size):
        lives = [life for life in story.lives if life.process == process]
        life = max(lives, key=lambda life: len(life.messages))
        for place, series in ((BETWEEN, between(life)), (WITHIN, within(life))):
            if series:
                judged = process != story.part.mortal and place in judged_places(story.part)
                found.append(Figures(place, process, series, slope(series) if judged else None))
    return found


def judged(story: Story) -> bool:
    """Whether there are measurements enough to tell how the memory of each process grows."""
    known = {one.process for one in figures(story) if one.slope is not None}
    return known >= set(range(story.part.world_size)) - {story.part.mortal}


def problems(story: Story, bound_kib: float) -> list[str]:
    """Sentences that say what went wrong or did not stay flat; none if all is well.

    Args:
        story: What the processes told.
        bound_kib: Growth of resident memory in KiB per minute that is not yet a leak.
    """
    found = list(story.problems)
    for life in story.lives:
        who = f"{story.part.name}, process {life.process}"
        for series in (*between(life), *within(life)):
            found += [f"{who}: {what}" for what in _changes(series)]
    for one in figures(story):
        if one.slope is not None and one.slope > bound_kib:
            found.append(
                f"{story.part.name}, process {one.process}: resident memory grows by "
                f"{one.slope:.0f} KiB a minute {one.part}, more than {bound_kib:g}"
            )
    if judged_places(story.part) and not judged(story) and not story.problems:
        found.append(f"{story.part.name}: too few measurements to tell; give it more time")
    return found


def _changes(series: Series) -> list[str]:
    """What is counted and was not always the same, and sockets that were forgotten."""
    first, found = series[0], []
    for field in fields(Belongings):
        if field.name == "resident_kib":
            continue
        name = field.name.replace("_", " ")
        before = getattr(first.held, field.name)
        for message in series:
            now = getattr(message.held, field.name)
            if now != before:
                found.append(f"{before} {name} in round {first.round}, {now} in {message.round}")
                break
    if not first.within and any(message.held.half_closed for message in series):
        found.append("sockets in CLOSE_WAIT between rounds")
    return found
