"""Machines for the tests of this folder: three unlike ones, which boot once and after each cut."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from machines.machine import Hardware, Laboratory, Machine, kernels, laboratory, why_unavailable
from support.documents import ROOT

#: What a user's machines may differ in. Under TCG no processor has AVX-512; this host's may.
UNLIKE = {
    1: Hardware(),
    2: Hardware(kernel=kernels()[0] if kernels() else "", processor="max,-avx2,-fma"),
    3: Hardware(clock="2020-01-01", mtu=1280),
}


@pytest.fixture(scope="session")
def lab() -> Iterator[Laboratory]:
    """The network, without machines."""
    if reason := why_unavailable():
        pytest.skip(reason)
    with laboratory(len(UNLIKE)) as made:
        yield made


@pytest.fixture
def machines(lab: Laboratory) -> dict[int, Machine]:
    """All three, by number; those whose power was cut have booted again."""
    dark = {
        number: hardware
        for number, hardware in UNLIKE.items()
        if number not in lab.machines
        or lab.machines[number].process.poll() is not None
        or lab.machines[number].hardware != hardware
    }
    lab.boot_all(dark)
    return lab.machines


@pytest.fixture(scope="session")
def another_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment of another Python, with numpy and this gradring."""
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    for version in ("3.13", "3.12", "3.11", "3.10"):
        python = None if version == own else _python(version)
        if python is not None:
            break
    else:
        pytest.skip("needs a second Python of 3.10 to 3.13 in the PATH or of pyenv")
    place = tmp_path_factory.mktemp("python")
    subprocess.run([python, "-m", "venv", place], check=True)
    executable = place / "bin/python"
    # ml_dtypes has the bfloat16 of `tests/support/bits.py`.
    install = [executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*map(str, install), "numpy", "ml_dtypes"], check=True)
    asked = "import sysconfig; print(sysconfig.get_path('purelib'))"
    told = subprocess.run([executable, "-c", asked], stdout=subprocess.PIPE, text=True, check=True)
    Path(told.stdout.strip(), "checkout.pth").write_text(f"{ROOT / 'python'}\n")
    return executable


def _python(version: str) -> str | None:
    by_pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    return str(by_pyenv[-1]) if by_pyenv else shutil.which(f"python{version}")
