"""Flight records: a file from each rank with its last collectives and their times.

Times are nanoseconds since 1970 by the clock of rank 0, as exact as the ranks could compare their
clocks; None for an event that has not happened.
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeAlias

from gradring.errors import ConfigError

_log = logging.getLogger("gradring")

FORMAT = 1
#: A rank's statement for `_native.diagnose`: its number; its collectives as ordinal, call, step,
#: and whether it has ended; the ranks that it waits for; and seconds since then.
Statement: TypeAlias = tuple[int, list[tuple[int, str | None, int, bool]], list[int], float]
_FILE = re.compile(r"rank-(\d+)\.json")


@dataclass(frozen=True)
class Collective:
    """One collective of one rank."""

    sequence: int
    #: The call, such as ``all_reduce(sum) 'dense/kernel' float32[98]``.
    call: str
    bytes: int
    algorithm: str
    #: ``queued``, ``running``, ``done`` or ``failed``.
    state: str
    #: The last peer to enter, among those from which this rank receives.
    last: int | None
    launched_ns: int
    started_ns: int | None
    #: Time at which the last peer had entered.
    entered_ns: int | None
    ended_ns: int | None
    #: Begin and end of the program's wait for the collective.
    awaited_ns: tuple[int, int] | None
    #: Place of a wait of at least 0.1 s in the program, such as ``train.py:31``.
    place: str | None = None
    #: Step of the program; 0 for none.
    step: int = 0


@dataclass(frozen=True)
class Channel:
    """Sends from one rank to one other, or receives by one rank from one other."""

    partner: int
    calls: tuple[Collective, ...]


@dataclass(frozen=True)
class Record:
    """Flight record of one rank."""

    rank: int
    world_size: int
    host: str
    #: Reason for writing the record: ``error``, ``SIGUSR2`` or ``trace``.
    reason: str
    written_ns: int
    #: Largest error of the comparison of clocks; None if clocks could not be compared.
    clock_within_ns: int | None
    #: Failure of the group and the rank to blame, or None.
    failure: str | None
    blamed: int | None
    #: Number of older collectives that are in the record no more.
    forgotten: int
    collectives: tuple[Collective, ...]
    channels: tuple[Channel, ...] = ()
    #: Number of earlier groups of an elastic job.
    generation: int = 0

    def find(self, sequence: int) -> Collective | None:
        """Returns the collective of this ordinal, if it is in the record."""
        return next((c for c in reversed(self.collectives) if c.sequence == sequence), None)


def parse(text: bytes) -> Record:
    """Parses a record written by the native module.

    Raises:
        ValueError: The text is no record, or one of another version.
    """
    try:
        file = json.loads(text)
        if file["format"] != FORMAT:
            raise ValueError(f"format {file['format']} was written by another version")
        clock, failure = file["clock"], file["failure"] or {}
        shift_ns = clock["ns"] if clock else 0
        return Record(
            **{name: file[name] for name in ("rank", "world_size", "host", "reason", "forgotten")},
            written_ns=file["written_ns"] + shift_ns,
            clock_within_ns=clock["within_ns"] if clock else None,
            failure=failure.get("message"),
            blamed=failure.get("rank"),
            collectives=tuple(_collective(row, shift_ns) for row in file["collectives"]),
            channels=tuple(_channel(part, shift_ns) for part in file.get("channels", ())),
            generation=file["generation"],
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"it is no record of a rank: {error!r}") from error


def read(directory: Path) -> list[Record]:
    """Reads the records of the last group in a directory, in the order of ranks.

    In an elastic job, records of lost processes stay in the directory. They belong to an earlier
    group and are left out.

    Raises:
        ConfigError: There are no records, one is damaged, or they are from different jobs.
    """
    files = [path for path in sorted(directory.glob("rank-*.json")) if _FILE.fullmatch(path.name)]
    if not files:
        problem = "holds no records of ranks (rank-0.json and so on)"
        if not directory.is_dir():
            problem = "is a file" if directory.exists() else "does not exist"
        raise ConfigError(
            f"{directory} {problem}; name the directory that GRADRING_FLIGHT_DIR or gradring run "
            "--log-dir named when the job ran: ranks write there when the group fails, and on "
            "SIGUSR2"
        )
    found = {}
    for path in files:
        try:
            found[path] = parse(path.read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read ({error}); remove it") from error
    last = max(record.generation for record in found.values())
    for path in [path for path, record in found.items() if record.generation != last]:
        _log.warning("%s is left out: it is of an earlier group of an elastic job", path)
        del found[path]
    if len({record.world_size for record in found.values()}) > 1:
        raise ConfigError(f"{directory} holds records of several jobs; remove the older files")
    return sorted(found.values(), key=lambda record: record.rank)


def _channel(part: dict[str, Any], shift_ns: int) -> Channel:
    partner = part["partner"]
    calls = (_collective(row, shift_ns) for row in part["calls"])
    # Records of channels have the partner beside the calls.
    return Channel(partner, tuple(replace(call, last=partner) for call in calls))


def _collective(row: dict[str, Any], shift_ns: int) -> Collective:
    facts = {field.name: row[field.name] for field in fields(Collective) if field.name in row}
    if row["launched_ns"] is None:
        raise TypeError("a collective was launched at no time")
    for name, found in facts.items():
        if name.endswith("_ns") and found is not None:
            is_span = isinstance(found, list)
            facts[name] = tuple(t + shift_ns for t in found) if is_span else found + shift_ns
    return Collective(**facts)
