"""Interpreters of this machine, and empty environments of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
"""The versions that the classifiers name."""

_PROBE = "import sys, venv; print('%d.%d' % sys.version_info[:2])"


@cache
def interpreter(version: str) -> Path | None:
    """A Python of this version that can make environments, or None."""
    for candidate in _candidates(version):
        try:
            probe = subprocess.run(
                [candidate, "-c", _PROBE], capture_output=True, text=True, timeout=60
            )
        except OSError:
            continue
        # A shim of pyenv exists for every version, and fails for those that are not chosen.
        if probe.returncode == 0 and probe.stdout.strip() == version:
            return candidate
    return None


def _candidates(version: str) -> Iterator[Path]:
    name = f"python{version}"
    yield Path(sys.base_prefix, "bin", name)
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from sorted(pyenv.glob(f"versions/{version}.*/bin/{name}"))
    data = Path(os.environ.get("XDG_DATA_HOME", Path.home() / ".local" / "share"))
    uv = Path(os.environ.get("UV_PYTHON_INSTALL_DIR", data / "uv" / "python"))
    yield from sorted(uv.glob(f"cpython-{version}.*/bin/{name}"))
    for directory in os.get_exec_path():
        found = shutil.which(name, path=directory)
        if found is not None:
            yield Path(found)


@contextmanager
def environment_of(python: Path | str = sys.executable) -> Iterator[Environment]:
    """An empty environment, removed at the end: with TensorFlow it takes a gigabyte."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        yield Environment(Path(directory), python)


class Environment:
    """A directory with an environment ``env`` that nothing of this project leaks into."""

    def __init__(self, directory: Path, python: Path | str) -> None:
        """Makes the environment, without pip: that of this process installs into it."""
        self.directory = directory
        subprocess.run(
            [python, "-m", "venv", "--without-pip", "env"],
            cwd=directory,
            env=self.variables,
            check=True,
        )

    @property
    def variables(self) -> dict[str, str]:
        """Those of a new shell that has activated the environment."""
        keep = ("HOME", "LANG", "PIP_INDEX_URL", "PIP_CONFIG_FILE", "SSL_CERT_FILE", "TMPDIR")
        kept = {name: os.environ[name] for name in keep if name in os.environ}
        return kept | {"PATH": f"{self.directory}/env/bin:/usr/bin:/bin"}

    def pip(self, *arguments: str, variables: dict[str, str] | None = None) -> str:
        """Runs pip for the environment; returns what it printed."""
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python"]
        # Of TensorFlow's ten thousand files, a program imports a part.
        compiling = {"PIP_NO_COMPILE": "1"}
        done = subprocess.run(
            [*command, str(self.directory / "env"), *arguments],
            cwd=self.directory,
            env=self.variables | compiling | (variables or {}),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def packages(self) -> set[str]:
        """Names of the packages that it has, with hyphens: pip prints what their authors wrote."""
        listed = self.pip("list", "--format=freeze").splitlines()
        return {line.partition("==")[0].partition(" @")[0].replace("_", "-") for line in listed}

    def run(self, *command: str, exit_code: int = 0) -> str:
        """Runs a command in the directory; returns what it printed."""
        done = subprocess.run(
            command,
            cwd=self.directory,
            env=self.variables,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=240,
        )
        assert done.returncode == exit_code, done.stdout
        return done.stdout
