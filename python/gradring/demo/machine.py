"""How busy other programs keep the machine while something is measured."""

from __future__ import annotations

import os
import platform
import re
import resource
import time
from dataclasses import dataclass
from pathlib import Path

IDLE_COLUMNS = (3, 4)
"""Of the first line of /proc/stat after its name: idle, and idle with a disk at work."""
_MODEL = re.compile(r"^model name\s*: (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Usage:
    """Processor time in seconds, and the moment at which it was read."""

    machine_s: float
    children_s: float
    moment_s: float

    @classmethod
    def now(cls) -> Usage:
        """Of the whole machine, and of this process's children that have ended."""
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return cls(
            machine_s=busy_s(Path("/proc/stat").read_text(), os.sysconf("SC_CLK_TCK")),
            children_s=children.ru_utime + children.ru_stime,
            moment_s=time.monotonic(),
        )


def describe(cores: int) -> str:
    """The processors and the system, for people."""
    found = _MODEL.search(Path("/proc/cpuinfo").read_text())
    model = " ".join(found[1].split()) if found else platform.machine()
    usable = f"{cores} core{'s' if cores > 1 else ''}"
    return f"{model}, {usable}; {platform.system()} {platform.release()}"


def busy_s(stat: str, ticks_per_s: int) -> float:
    """Busy seconds of all processors since boot, from the text of /proc/stat."""
    # The last two columns, guests, are contained in the first two.
    ticks = [int(text) for text in stat.splitlines()[0].split()[1:9]]
    busy = sum(count for column, count in enumerate(ticks) if column not in IDLE_COLUMNS)
    return busy / ticks_per_s


def share_of_others(before: Usage, after: Usage, cores: int) -> float:
    """The fraction of the processors' time that went to anything but this process's children."""
    others_s = (after.machine_s - before.machine_s) - (after.children_s - before.children_s)
    available_s = (after.moment_s - before.moment_s) * cores
    return min(1.0, max(0.0, others_s / available_s))
