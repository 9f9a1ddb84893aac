"""The built wheel, installed alone into empty environments and used outside the source tree."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

NUMPY_PROGRAM = """\
import numpy as np
import gradring

with gradring.init() as comm:
    x = np.arange(1000, dtype=np.float32) * (comm.rank + 1)
    comm.all_reduce(x)
    assert (x == np.arange(1000) * 6).all()
    print("rank", comm.rank, "of", comm.world_size, "has the sum")
"""


@pytest.fixture(scope="session")
def wheel(pytestconfig: pytest.Config) -> Path:
    path = pytestconfig.getoption("--wheel")
    assert isinstance(path, Path) and path.is_file()
    return path.absolute()


def clean_environment(directory: Path) -> dict[str, str]:
    """The variables of a new shell: nothing of this project's environment leaks in."""
    keep = ("HOME", "LANG", "PIP_INDEX_URL", "PIP_CONFIG_FILE", "SSL_CERT_FILE", "TMPDIR")
    environment = {name: os.environ[name] for name in keep if name in os.environ}
    return environment | {"PATH": f"{directory}/env/bin:/usr/bin:/bin"}


def install(directory: Path, requirement: str) -> None:
    base = Path(sys.base_prefix, "bin", "python3")
    environment = clean_environment(directory)
    subprocess.run([base, "-m", "venv", "env"], cwd=directory, env=environment, check=True)
    subprocess.run(
        ["env/bin/pip", "install", "--quiet", "--disable-pip-version-check", requirement],
        cwd=directory,
        env=environment,
        check=True,
    )


def run(directory: Path, *command: str) -> str:
    result = subprocess.run(
        command,
        cwd=directory,
        env=clean_environment(directory),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=240,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """A directory with an environment that has the wheel and what it needs."""
    directory = tmp_path_factory.mktemp("plain")
    install(directory, str(wheel))
    return directory


def test_the_wheel_needs_numpy_alone(plain: Path) -> None:
    listed = run(plain, "env/bin/pip", "list", "--format=freeze", "--disable-pip-version-check")
    names = {line.partition("==")[0].partition(" @")[0] for line in listed.splitlines()}
    assert names - {"pip", "setuptools"} == {"gradring", "numpy"}


def test_the_wheel_is_for_every_python_from_3_10_and_any_x86_or_arm_cpu(wheel: Path) -> None:
    assert re.search(r"-cp310-abi3-.*linux_", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "gradring/_native.abi3.so" in names
    assert "gradring/py.typed" in names
    assert not [name for name in names if name.startswith(("tests/", "benches/"))]


def test_three_ranks_all_reduce_a_numpy_array(plain: Path) -> None:
    plain.joinpath("sum.py").write_text(NUMPY_PROGRAM)
    output = run(plain, "gradring", "run", "-np", "3", "python", "sum.py")
    assert sorted(output.splitlines()) == [
        f"[{rank}] rank {rank} of 3 has the sum" for rank in range(3)
    ]


def test_the_import_is_quick_and_leaves_tensorflow_alone(plain: Path) -> None:
    program = "import gradring, sys; print('tensorflow' in sys.modules, gradring.build_info())"
    output = run(plain, "python", "-c", program)
    assert output.startswith("False")
    assert "'debug': False" in output


def test_the_demo_says_what_to_install(plain: Path) -> None:
    result = subprocess.run(
        ["gradring", "demo"],
        cwd=plain,
        env=clean_environment(plain),
        text=True,
        capture_output=True,
    )
    assert result.returncode == 2
    assert "pip install 'gradring[demo]'" in result.stderr


def test_the_demo_runs_from_the_wheel(
    tmp_path_factory: pytest.TempPathFactory, wheel: Path
) -> None:
    directory = tmp_path_factory.mktemp("demo")
    install(directory, f"gradring[demo] @ file://{wheel}")
    output = run(directory, "gradring", "demo", "--report", "report")
    assert "bit-identical" in output
    assert list(directory.glob("report/*.png"))
