"""The one wheel under every Python that it is for, as far as this machine has them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from environments import PYTHONS, environment_of, interpreter

from support.chosen import marked
from support.documents import programs

NUMPY_PROGRAM = """\
import sys
import numpy as np
import gradring

with gradring.init() as comm:
    x = np.arange(1000, dtype=np.float32) * (comm.rank + 1)
    comm.all_reduce(x)
    assert (x == np.arange(1000) * 3).all()
    try:
        comm.all_reduce(np.ones((4, 4))[:, ::2])
    except ValueError as error:
        assert "contiguous" in str(error), error
    else:
        raise AssertionError("an array with gaps was accepted")
    print("rank", comm.rank, "of", comm.world_size, "on", "%d.%d" % sys.version_info[:2])
"""


#: In every run of the tests: the oldest and the newest, and with TensorFlow the one that runs them.
OLDEST_AND_NEWEST = PYTHONS[0], PYTHONS[-1]
OWN = (f"{sys.version_info.major}.{sys.version_info.minor}",)


@pytest.fixture
def python(version: str) -> Path:
    found = interpreter(version)
    if found is None:
        pytest.skip(f"no Python {version} on the path, in pyenv or in uv")
    return found


@pytest.mark.parametrize("version", marked(PYTHONS, OLDEST_AND_NEWEST))
def test_a_python_reduces_arrays_and_refuses_bad_ones(
    python: Path, version: str, wheel: Path
) -> None:
    with environment_of(python) as clean:
        clean.pip("install", "--quiet", str(wheel))
        assert clean.packages() == {"gradring", "numpy"}
        assert re.fullmatch(r"gradring \d+\.\d+\.\d+\n", clean.run("gradring", "--version"))
        clean.directory.joinpath("sum.py").write_text(NUMPY_PROGRAM)
        output = clean.run("gradring", "run", "-np", "2", "python", "sum.py")
    assert sorted(output.splitlines()) == [
        f"[{rank}] rank {rank} of 2 on {version}" for rank in (0, 1)
    ]


@pytest.mark.timeout(1200)  # installs TensorFlow
@pytest.mark.parametrize("version", marked(PYTHONS, OWN))
def test_a_python_trains_with_tensorflow(python: Path, wheel: Path) -> None:
    with environment_of(python) as clean:
        clean.pip("install", "--quiet", f"gradring[tensorflow-cpu] @ file://{wheel}")
        clean.directory.joinpath("train.py").write_text(programs()["train.py"])
        output = clean.run("gradring", "run", "-np", "2", "python", "train.py")
    losses = [re.findall(rf"^\[{rank}\] ([\d.]+)$", output, re.M) for rank in (0, 1)]
    assert len(losses[0]) == 10, output
    assert losses[0] == losses[1]
    assert float(losses[0][-1]) < float(losses[0][0])
