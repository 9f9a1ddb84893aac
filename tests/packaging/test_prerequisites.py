"""Answers of `make` where something is missing or too old, before anything is installed."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from environments import PYTHONS

from support.documents import ROOT

#: What the Makefile itself calls.
TOOLS = ("sh", "cut", "find", "sed", "sort")


@pytest.fixture
def bin_directory(tmp_path: Path) -> Path:
    """All that a search path must have: stand-ins for what is checked, which are good enough."""
    for name in TOOLS:
        tmp_path.joinpath(name).symlink_to(shutil.which(name) or name)
    for name in ("cargo", "cc"):
        program(tmp_path / name, "exit 0")
    program(tmp_path / "rustc", "echo 'rustc 1.95.0 (59807616e 2026-04-14)'")
    program(tmp_path / "python3", interpreter(PYTHONS[0]))
    return tmp_path


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def interpreter(version: str) -> str:
    """One that says that it has this version."""
    pretend = f"import sys; sys.version_info = tuple(map(int, '{version}.0'.split('.')))"
    return f"""if [ "$1" = -V ]; then echo Python {version}.0; exit; fi
    exec {shlex.quote(sys.executable)} -c "{pretend}; $2" """


def prerequisites(bin_directory: Path, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [shutil.which("make") or "make", "--silent", "prerequisites", *arguments],
        cwd=ROOT,
        env={"PATH": str(bin_directory)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cargo", "Rust is missing. Install it with: curl"),
        ("cc", "A C linker is missing. Install it with: apt-get install gcc"),
        ("python3", "Python is missing. Install it with: apt-get install python3"),
    ],
)
def test_what_is_missing_is_named_with_the_command_that_installs_it(
    bin_directory: Path, name: str, said: str
) -> None:
    bin_directory.joinpath(name).unlink()
    code, output = prerequisites(bin_directory)
    assert code != 0 and output.startswith(said)


@pytest.mark.parametrize("version", PYTHONS)
def test_a_python_that_tensorflow_has_packages_for_is_taken(
    bin_directory: Path, version: str
) -> None:
    program(bin_directory / "mine", interpreter(version))
    assert prerequisites(bin_directory, "PYTHON=mine") == (0, "")


@pytest.mark.parametrize("version", ["3.9", f"3.{int(PYTHONS[-1].partition('.')[2]) + 1}"])
def test_another_python_is_refused(bin_directory: Path, version: str) -> None:
    program(bin_directory / "mine", interpreter(version))
    code, output = prerequisites(bin_directory, "PYTHON=mine")
    assert code != 0 and output.startswith(
        f"mine is Python {version}.0, and TensorFlow has packages for Python "
        f"{PYTHONS[0]} to {PYTHONS[-1]}. Install one of these"
    )


def test_a_python_without_venv_is_refused(bin_directory: Path) -> None:
    without = "case $2 in *ensurepip*) exit 1;; esac\n"
    program(bin_directory / "python3", without + interpreter(PYTHONS[0]))
    code, output = prerequisites(bin_directory)
    assert code != 0 and output.startswith("Python's venv is missing. Install it with: apt-get")


@pytest.mark.parametrize("version", ["1.84.1", "1.88.0"])
def test_an_older_rust_is_refused(bin_directory: Path, version: str) -> None:
    program(bin_directory / "rustc", f"echo 'rustc {version} (abc 2025-01-01)'")
    code, output = prerequisites(bin_directory)
    assert code != 0 and "is older than 1.89. Install a newer one with: rustup update" in output
