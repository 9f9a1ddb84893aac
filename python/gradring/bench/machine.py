"""Where and with what something was measured."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

import numpy as np

from gradring import build_info
from gradring.bench import systems

_CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")


def date() -> str:
    """Of now, to the minute, with the time zone."""
    return f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}"


def machine() -> str:
    """Processor, cores that this process may use, and system; nothing that names the host."""
    cores = len(os.sched_getaffinity(0))
    return f"{cpu_model()}, {cores} cores, {platform.system()} {platform.machine()}"


def load() -> float:
    """Processes that wanted a core in the last minute; well below one on a quiet machine."""
    return round(os.getloadavg()[0], 1)


def available_memory() -> int | None:
    """Bytes that programs may take before the system swaps; None if it does not say."""
    try:
        rows = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    kibibytes = (row.split()[1] for row in rows if row.startswith("MemAvailable:"))
    return next((int(number) << 10 for number in kibibytes), None)


def cpu_model() -> str:
    """The processor's own name, or else its architecture."""
    try:
        rows = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        rows = []
    names = (row.partition(":")[2].strip() for row in rows if row.startswith("model name"))
    return next(names, platform.machine())


def congestion_control() -> str:
    """The kernel's default for new TCP connections, on which bandwidth over loopback depends."""
    try:
        return _CONGESTION.read_text().strip()
    except OSError:
        return "unknown"


def versions(peers: Iterable[str] = ()) -> str:
    """Ours, Python's and numpy's, and those of ``peers``, which must be installed."""
    build = build_info()
    kind = ", debug build" if build["debug"] else ""
    known = [
        f"gradring {build['version']} ({build['instruction_set']}{kind})",
        f"Python {platform.python_version()}",
        f"numpy {np.__version__}",
        *(systems.load_peer(peer).version() for peer in peers),
    ]
    return ", ".join(known)
