"""Paths of the records that ranks leave."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def flight_of(log_dir: Path) -> Path:
    """Where ``gradring run --log-dir`` lets ranks leave their flight records."""
    return log_dir / "flight"


def attempts(directory: Path) -> list[Path]:
    """Where the records are: in subdirectories if ``gradring run --max-restarts`` has made some.

    Args:
        directory: That of the flight records, of a timeline's parts, or of ``--log-dir``.
    """
    if flight_of(directory).is_dir() and not any(written(directory)):
        directory = flight_of(directory)
    numbered = [path for path in directory.glob("attempt-*") if path.name[8:].isdecimal()]
    held = [path for path in numbered if any(path.glob("rank-*.json"))]
    return sorted(held, key=lambda path: int(path.name[8:])) or [directory]


def of_attempt(directory: Path, attempt: int) -> Path:
    """The directory for the records of one attempt."""
    return directory / f"attempt-{attempt}"


def written(directory: Path) -> Iterator[Path]:
    """All records in a directory, of all attempts."""
    for pattern in ("rank-*.json", "attempt-*/rank-*.json"):
        yield from directory.glob(pattern)


def forget(directory: Path) -> None:
    """Removes the records that an earlier run has left."""
    for path in written(directory):
        path.unlink(missing_ok=True)


def part_of(trace: Path, rank: int) -> Path:
    """Where a rank leaves its part of the timeline that is to be the file ``trace``."""
    return parts_of(trace) / f"rank-{rank}.json"


def parts_of(trace: Path) -> Path:
    """The directory of the parts of the timeline that is to be the file ``trace``."""
    return trace.with_name(f"{trace.name}.parts")
