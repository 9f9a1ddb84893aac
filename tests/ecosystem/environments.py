"""An environment for each package, made by uv: one copy of each file, with links from its cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from ecosystem.catalogue import Package

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / ".venv-ecosystem"

#: Most packages ask for `tensorflow`, which tensorflow-cpu is, but for its name.
OVERRIDES = "tensorflow ; sys_platform == 'never'\n"
#: What the packages require has the versions of this day. For newer packages, choose a newer day.
NEWEST = "2026-11-28"


def make_environment(package: Package, wheel: Path) -> Path:
    """The directory of one with the package and this wheel, which is new or was there.

    Raises:
        subprocess.CalledProcessError: uv could not make it, and has said why.
    """
    ENVIRONMENTS.mkdir(exist_ok=True)
    overrides = ENVIRONMENTS / "overrides.txt"
    overrides.write_text(OVERRIDES)
    directory = ENVIRONMENTS / package.name
    wanted = "\n".join([*package.requirements, NEWEST])
    made_with = directory / "requirements.txt"
    if not made_with.exists() or made_with.read_text() != wanted:
        shutil.rmtree(directory, ignore_errors=True)
        _uv("venv", "--python", package.python, str(directory))
        is_other = package.distribution != "tensorflow"
        options = ["--override", str(overrides)] if is_other else []
        _install(directory, "--exclude-newer", NEWEST, *options, *package.requirements)
        made_with.write_text(wanted)
    _install(directory, "--no-deps", "--reinstall", str(wheel))
    return directory


def _install(directory: Path, *arguments: str) -> None:
    _uv("pip", "install", "--python", str(directory), *arguments)


def _uv(*arguments: str) -> None:
    # Links need a cache on the same file system.
    environment = {**os.environ, "UV_CACHE_DIR": str(ENVIRONMENTS / "cache")}
    subprocess.run([_found_uv(), "--quiet", *arguments], env=environment, check=True)


def _found_uv() -> str:
    beside = Path(sys.executable).parent / "uv"
    found = str(beside) if beside.exists() else shutil.which("uv")
    if found is None:
        raise SystemExit("uv is missing. Install it with: python -m pip install uv")
    return found
