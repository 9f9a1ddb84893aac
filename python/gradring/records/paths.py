"""Paths of the records that ranks leave."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_NUMBERED = re.compile(r"(attempt|generation|group)-\d+", re.ASCII)


def flight_of(log_dir: Path) -> Path:
    """Where ``gradring run --log-dir`` lets ranks leave their flight records."""
    return log_dir / "flight"


def directories(directory: Path) -> list[Path]:
    """Where the records are: each attempt, and each group of a process, has a directory.

    Args:
        directory: That of the flight records, of a timeline's parts, or of ``--log-dir``.
    """
    if flight_of(directory).is_dir() and not any(written(directory)):
        directory = flight_of(directory)

    def numbers(held: Path) -> list[int]:
        return [int(part.rpartition("-")[2]) for part in held.relative_to(directory).parts]

    return sorted({path.parent for path in written(directory)}, key=numbers) or [directory]


def of_attempt(directory: Path, attempt: int) -> Path:
    """The directory for the records of one attempt."""
    return directory / f"attempt-{attempt}"


def of_group(directory: Path, number: int) -> Path:
    """The directory for the records of one group of a process, which are numbered from 1."""
    return directory if number == 1 else directory / f"group-{number}"


def of_generation(directory: Path, generation: int) -> Path:
    """The directory for those of a group of an elastic job: they say nothing about each other."""
    return directory if generation == 0 else directory / f"generation-{generation}"


def written(directory: Path) -> Iterator[Path]:
    """All records in a directory, of all attempts and groups."""
    yield from directory.glob("rank-*.json")
    for part in directory.glob("*-*/"):
        if _NUMBERED.fullmatch(part.name):
            yield from written(part)


def forget(directory: Path) -> None:
    """Removes the records that an earlier run has left."""
    for path in written(directory):
        path.unlink(missing_ok=True)


def part_of(trace: Path, rank: int, group: int) -> Path:
    """Where a rank of a group leaves its part of the timeline that is to be the file ``trace``."""
    return of_group(parts_of(trace), group) / f"rank-{rank}.json"


def parts_of(trace: Path) -> Path:
    """The directory of the parts of the timeline that is to be the file ``trace``."""
    return trace.with_name(f"{trace.name}.parts")
