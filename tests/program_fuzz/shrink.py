"""Shrinking: each feature becomes plain in turn, while the difference stays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from program_fuzz.features import FEATURES, Program, has, plain, settled
from program_fuzz.runs import Finding, Fuzz


def shrunk(finding: Finding, directory: Path) -> tuple[Program, str]:
    """The smallest program with a difference of the same kind, and this difference.

    Programs with one feature less run in one group; then what may go goes at once, and so on.
    """
    program, difference = finding.program, finding.difference
    for turn in range(8):
        smaller = [each for each in _smaller(program) if each != program]
        if not smaller:
            break
        fuzz = Fuzz(directory / str(program["seed"]) / str(turn), [finding.ranks])
        findings = fuzz.run(dict(enumerate(smaller)))
        alike = [each for each in findings if _kind(each.difference) == _kind(difference)]
        if not alike:
            break
        best = min(alike, key=lambda each: size_of(each.program))
        program, difference = best.program, best.difference
    return program, difference


def _smaller(program: Program) -> Iterator[Program]:
    """All at once, halves, and one by one."""
    names = [name for name in FEATURES if has(program, name) and name != "door"]
    half = len(names) // 2
    for gone in (names[:half], names[half:], *([name] for name in names)):
        yield settled({**program, **{name: plain(name) for name in gone}})
    for name in ("body", "callbacks", "metrics", "after"):
        for index in range(len(program[name])):
            rest = program[name][:index] + program[name][index + 1 :]
            yield settled({**program, name: rest})


def size_of(program: Program) -> int:
    """How many features are not plain, and how many layers it has."""
    return sum(has(program, name) for name in FEATURES) + len(program["body"])


def _kind(difference: str) -> str:
    """Whether it fails, and how, or what differs."""
    return " ".join(difference.split()[:2]) if difference.startswith("fails") else difference[:4]
