"""Where and with what something was measured."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import numpy as np

from gradring import build_info

_TENSORFLOW_PACKAGES = ("tensorflow", "tensorflow-cpu")


def machine() -> str:
    """Processor, cores that this process may use, and system; nothing that names the host."""
    cores = len(os.sched_getaffinity(0))
    return f"{cpu_model()}, {cores} cores, {platform.system()} {platform.machine()}"


def load() -> float:
    """Processes that wanted a core in the last minute; well below one on a quiet machine."""
    return round(os.getloadavg()[0], 1)


def cpu_model() -> str:
    """The processor's own name, or else its architecture."""
    try:
        rows = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        rows = []
    names = (row.partition(":")[2].strip() for row in rows if row.startswith("model name"))
    return next(names, platform.machine())


def versions(packages: Iterable[str] = ()) -> str:
    """Ours, Python's and numpy's, and those of ``packages`` that are installed."""
    build = build_info()
    kind = ", debug build" if build["debug"] else ""
    known = [
        f"gradring {build['version']} ({build['instruction_set']}{kind})",
        f"Python {platform.python_version()}",
        f"numpy {np.__version__}",
    ]
    for package in packages:
        version = _version_of(package)
        if version is not None:
            known.append(f"{package} {version}")
    return ", ".join(known)


def _version_of(package: str) -> str | None:
    for name in _TENSORFLOW_PACKAGES if package == "tensorflow" else (package,):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None
