"""Resources of this machine as reported by Linux: processors, memory, load and processes."""

from __future__ import annotations

import math
import os
import platform
from datetime import datetime
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")


def date() -> str:
    """Returns the present time to the minute, with the time zone."""
    return f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}"


def machine() -> str:
    """Returns processor, usable cores and system, without anything that identifies the host."""
    cores = len(os.sched_getaffinity(0))
    return f"{cpu_model()}, {cores} cores, {platform.system()} {platform.machine()}"


def cores() -> float:
    """Returns the number of cores that this process may use: its affinity or its quota.

    Containers and batch systems set a quota that no affinity shows, such as half a core.
    """
    own = Path("/proc/self/cgroup")
    return min(len(os.sched_getaffinity(0)), quota(own.read_text() if own.exists() else ""))


def quota(own: str, root: Path = _CGROUPS) -> float:
    """Returns the lowest quota of cores in all control groups; infinite if none is set.

    Args:
        own: Text of /proc/self/cgroup.
        root: Directory of the control groups.
    """
    found = [math.inf]
    for line in own.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        tree = root / controllers
        # A container may see its own group as the root, although its path is the one outside.
        within = [tree / part for part in (Path(path.strip("/")), *Path(path.strip("/")).parents)]
        found.extend(_quota_of(group) for group in within)
    return min(found)


def _quota_of(group: Path) -> float:
    """Returns one group's quota over its period, from one file or, in version 1, from two."""
    try:
        if (group / "cpu.max").exists():
            most, period = (group / "cpu.max").read_text().split()
        else:
            most = (group / "cpu.cfs_quota_us").read_text()
            period = (group / "cpu.cfs_period_us").read_text()
        return int(most) / int(period) if int(most) > 0 else math.inf
    except (OSError, ValueError):  # "max", or no such controller
        return math.inf


def load() -> float:
    """Returns the load average of the last minute; well below 1 on a quiet machine."""
    return round(os.getloadavg()[0], 1)


def available_memory() -> int | None:
    """Returns the bytes that programs may use before the system swaps; None if unknown."""
    kibibytes = _fact("/proc/meminfo", "MemAvailable")
    return None if kibibytes is None else int(kibibytes.split()[0]) << 10


def cpu_model() -> str:
    """Returns the processor's model name, or else its architecture."""
    return _fact("/proc/cpuinfo", "model name") or platform.machine()


def congestion_control() -> str:
    """Returns the default congestion control of TCP, which affects bandwidth over loopback."""
    try:
        return _CONGESTION.read_text().strip()
    except OSError:
        return "unknown"


def processes() -> list[int]:
    """Returns the ids of all visible processes."""
    return sorted(int(path.name) for path in Path("/proc").glob("[0-9]*"))


def group_if_running(process: int) -> int | None:
    """Returns the process group; None if the process has ended, even if it is a zombie."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text(errors="replace")
    except OSError:
        return None
    state, _parent, group = stat.rpartition(")")[2].split()[:3]
    return None if state in "ZX" else int(group)


def handles(process: int, signum: int) -> bool:
    """Returns whether a process has a handler for a signal."""
    caught = _fact(f"/proc/{process}/status", "SigCgt") or "0"
    return bool(int(caught, 16) >> (signum - 1) & 1)


def _fact(path: str, name: str) -> str | None:
    """Returns the text after a name and a colon in a file of /proc, or None."""
    try:
        rows = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((row.partition(":")[2].strip() for row in rows if row.startswith(name)), None)
