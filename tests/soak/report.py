"""The tables: one while the soak runs, one at its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from soak.crew import Story
from soak.member import Message
from soak.verdict import Figures, figures

KIB_PER_MIB = 1024
LIVE = "min  part                     process  rounds  collectives   steps  RSS MiB  fds  threads"
FINAL = (
    *("part", "process", "measured", "resident memory", "slope"),
    *("fds", "threads", "shared mappings", "CLOSE_WAIT"),
)


def live(minute: float, story: Story) -> str:
    """What every process of a part held when it was last heard of."""
    lines = []
    for process in range(story.part.world_size):
        told = [m for life in story.lives if life.process == process for m in life.messages]
        if told:
            last = told[-1]
            lines.append(
                f"{minute:3.0f}  {story.part.name:23}  {process:7}  {last.round - 1:6}  "
                f"{last.collectives:11,}  {last.steps:6,}  "
                f"{last.held.resident_kib / KIB_PER_MIB:7.1f}  {last.held.descriptors:3}  "
                f"{last.held.threads:7}"
            )
    return "\n".join(lines)


def final(stories: Sequence[Story]) -> str:
    """What was found, as a Markdown table."""
    lines = [f"| {' | '.join(FINAL)} |", "|---" * len(FINAL) + "|"]
    lines += [_line(story, one) for story in stories for one in figures(story)]
    return "\n".join(lines)


def _line(story: Story, one: Figures) -> str:
    messages = one.messages
    first, last = (m.held.resident_kib / KIB_PER_MIB for m in (messages[0], messages[-1]))
    cells = (
        *(story.part.name, f"{one.process}", f"{len(messages)} times {one.part}"),
        f"{first:.1f} to {last:.1f} MiB",
        "" if one.slope is None else f"{one.slope:+.0f} KiB/min",
        _range(messages, lambda m: m.held.descriptors),
        _range(messages, lambda m: m.held.threads),
        _range(messages, lambda m: m.held.mappings),
        _range(messages, lambda m: m.held.half_closed),
    )
    return f"| {' | '.join(cells)} |"


def _range(messages: Sequence[Message], value: Callable[[Message], int]) -> str:
    low, high = min(map(value, messages)), max(map(value, messages))
    return f"{low}" if low == high else f"{low} to {high}"


def summary(stories: Sequence[Story]) -> str:
    """How much was done."""
    rounds = sum(story.rounds for story in stories)
    done = [story.done() for story in stories]
    replaced = sum(len(story.lives) - story.part.world_size for story in stories)
    return (
        f"{sum(d[0] for d in done):,} collectives and {sum(d[1] for d in done):,} training steps "
        f"in {rounds:,} groups; {replaced} processes were killed and replaced."
    )
