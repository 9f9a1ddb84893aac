"""The record of a run of ``gradring bench all-reduce`` or ``make bench``."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from gradring import build_info
from gradring.machine import resources
from gradring.tools.bench import systems
from gradring.tools.bench.measurement import Measurement
from gradring.tools.bench.network import in_words


@dataclass(frozen=True)
class Record:
    """The facts of a run, which are keys of the JSON beside those of each measurement.

    Attributes:
        command: The command that repeats the run.
        date: Start of the run, to the minute, with the time zone.
        machine: Processor, cores and system.
        load_at_start: Load average of the last minute at the start.
        tcp_congestion_control: Name of the congestion control, with exceptions.
        versions: Versions of gradring, Python, numpy and the peers.
        measurements: One for each system and size measured so far.
    """

    command: str
    date: str
    machine: str
    load_at_start: float
    tcp_congestion_control: str
    versions: str
    measurements: list[Measurement] = field(default_factory=list)

    @classmethod
    def begin(cls, command: str, congestion: str | None, peers: Iterable[str]) -> Record:
        """Returns the record of a run that begins now.

        Args:
            command: The command that repeats the run.
            congestion: The TCP congestion control of all systems; None if each has its own.
            peers: Names of the peers, which must be installed.
        """
        return cls(
            command=command,
            date=resources.date(),
            machine=resources.machine(),
            load_at_start=resources.load(),
            tcp_congestion_control=in_words(congestion),
            versions=versions(peers),
        )

    def write(self, path: Path) -> None:
        """Writes a JSON list: a line and an object for each measurement, with the facts of the run.

        Raises:
            OSError: The file cannot be written.
        """
        facts = asdict(self)
        del facts["measurements"]
        rows = (json.dumps(asdict(row) | facts) for row in self.measurements)
        path.write_text("[\n" + ",\n".join(rows) + "\n]\n")


def versions(peers: Iterable[str] = ()) -> str:
    """Returns the versions of gradring, Python, numpy and ``peers``, which must be installed."""
    build = build_info()
    kind = ", debug build" if build["debug"] else ""
    known = [
        f"gradring {build['version']} ({build['instruction_set']}{kind})",
        f"Python {platform.python_version()}",
        f"numpy {np.__version__}",
        *(systems.load_peer(peer).version() for peer in peers),
    ]
    return ", ".join(known)
