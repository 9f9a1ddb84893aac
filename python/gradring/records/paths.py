"""Paths of ranks' records."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_NUMBERED = re.compile(r"(attempt|generation|group)-\d+", re.ASCII)


def flight_of(log_dir: Path) -> Path:
    """Returns the directory of flight records below that of ``gradring run --log-dir``."""
    return log_dir / "flight"


def directories(directory: Path) -> list[Path]:
    """Returns all directories with records: each attempt and each group has its own.

    Args:
        directory: Directory of flight records, of a timeline's parts, or of ``--log-dir``.
    """
    if flight_of(directory).is_dir() and not any(written(directory)):
        directory = flight_of(directory)

    def numbers(held: Path) -> list[int]:
        return [int(part.rpartition("-")[2]) for part in held.relative_to(directory).parts]

    return sorted({path.parent for path in written(directory)}, key=numbers) or [directory]


def of_attempt(directory: Path, attempt: int) -> Path:
    """Returns the directory of the records of one attempt."""
    return directory / f"attempt-{attempt}"


def of_group(directory: Path, number: int) -> Path:
    """Returns the directory of the records of a process's group; groups count from 1."""
    return directory if number == 1 else directory / f"group-{number}"


def of_generation(directory: Path, generation: int) -> Path:
    """Returns the directory of one group of an elastic job; groups are diagnosed separately."""
    return directory if generation == 0 else directory / f"generation-{generation}"


def written(directory: Path) -> Iterator[Path]:
    """Yields all records in a directory, of all attempts and groups."""
    yield from directory.glob("rank-*.json")
    for part in directory.glob("*-*/"):
        if _NUMBERED.fullmatch(part.name):
            yield from written(part)


def forget(directory: Path) -> None:
    """Removes the records of an earlier run."""
    for path in written(directory):
        path.unlink(missing_ok=True)


def part_of(trace: Path, rank: int, group: int) -> Path:
    """Returns the file of a rank's part of the timeline ``trace``."""
    return of_group(parts_of(trace), group) / f"rank-{rank}.json"


def parts_of(trace: Path) -> Path:
    """Returns the directory of the parts of the timeline ``trace``."""
    return trace.with_name(f"{trace.name}.parts")
