"""Programs that import `horovod` find gradring, where the variable says so, and nowhere else."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import ssh_stand_in
from launching import executable

from support.commands import completed
from support.installed import START, environment_with_start_hook

#: Of the real one, which must not be imported.
REAL = 'raise SystemExit("this is the real Horovod")\n'

#: What an installed program does: nobody has changed a line of it.
PROGRAM = """\
import sys
early = {"gradring", "numpy", "tensorflow"} & set(sys.modules)
assert not early, early
import horovod.tensorflow as hvd
from horovod.common.exceptions import HorovodInternalError
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.functions import broadcast_variables
from horovod.tensorflow.keras import callbacks
from horovod.tensorflow.mpi_ops import Sum, rank
import horovod.keras
from horovod import common, keras
from horovod.tensorflow import functions, mpi_ops, util
assert keras is horovod.keras and functions.broadcast_variables is broadcast_variables
assert mpi_ops.rank is rank and util.rank is rank and common is not None

assert hvd.gloo_enabled() and not hvd.mpi_enabled() and not hvd.nccl_built()
assert hvd._executing_eagerly()

import gradring.horovod.tensorflow as ours
import gradring.horovod.tensorflow.keras as ours_keras
assert hvd is ours and hvd.keras is ours_keras is horovod.keras
assert callbacks is ours_keras.callbacks and rank is ours.rank
assert ours.__spec__.name == ours.__name__ == "gradring.horovod.tensorflow"

import pickle
kind = callbacks.MetricAverageCallback
assert pickle.loads(pickle.dumps(kind)) is kind
theirs = b"chorovod.tensorflow.keras.callbacks\\nMetricAverageCallback\\n."
assert pickle.loads(theirs) is kind

hvd.init()
print(horovod.__version__, hvd.size(), float(hvd.allreduce(hvd.rank() + 1.0, op=Sum)), sys.argv[1:])
"""

#: Of names, without TensorFlow.
NAMES = """\
import importlib, sys
from importlib.util import find_spec

def text_of(do):
    try:
        return do()
    except Exception as error:
        return f"{type(error).__name__}: {error}"

import horovod
from horovod.common.util import gloo_built
assert gloo_built()
assert find_spec("horovod.torch") and find_spec("horovod.spark") and find_spec("horovod.keras")
assert find_spec("horovod.surely") is None
print(text_of(lambda: importlib.import_module("horovod.torch")))
print(text_of(lambda: importlib.import_module("horovod.runner.launch")))
print(text_of(lambda: importlib.import_module("horovod.surely")))
print(text_of(horovod.run))
from horovod import common
assert common.util.gloo_built is gloo_built
def imports():
    from horovod import torch
print(text_of(imports))
print(horovod.__name__, sys.argv[1:])
"""
SAID = [
    "ImportError: there is no horovod.torch: gradring takes the place of Horovod "
    "(GRADRING_AS_HOROVOD) with horovod.tensorflow, horovod.tensorflow.keras and horovod.keras, "
    "and without PyTorch",
    "ImportError: there is no horovod.runner: gradring takes the place of Horovod "
    "(GRADRING_AS_HOROVOD) with horovod.tensorflow, horovod.tensorflow.keras and horovod.keras, "
    "and without Horovod's launcher (gradring run, srun and mpirun start ranks)",
    "ModuleNotFoundError: No module named 'horovod.surely'",
    "NotImplementedError: horovod.run is not there: start the ranks of a program by gradring run, "
    "srun or mpirun; gradring.testing.run_ranks runs a function on ranks of this host",
]
SAID.append(SAID[0])


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has gradring and a real Horovod installed."""
    python = environment_with_start_hook(tmp_path_factory.mktemp("installed") / "env")
    (real,) = python.parents[1].glob("lib/python3*/site-packages")
    (real / "horovod").mkdir()
    (real / "horovod" / "__init__.py").write_text(REAL)
    return python


def names(directory: Path) -> Path:
    program = directory / "names.py"
    program.write_text(NAMES)
    return program


def launched(python: Path, *words: object, **variables: str) -> subprocess.CompletedProcess[str]:
    return completed([str(python), *map(str, words)], env=variables)


def test_an_installed_program_reduces_without_a_change(python: Path) -> None:
    """It is a console script, which no Python of ours starts, beside a real Horovod."""
    executable(python.parent / "trains", f"#!{python}\n{PROGRAM}")
    path = f"{python.parent}:/usr/bin:/bin"
    words = ["-m", "gradring", "run", "--as-horovod", "-np", 2, "trains", "--tf", "input.json"]
    done = launched(python, *words, PATH=path, TF_CPP_MIN_LOG_LEVEL="3")
    assert sorted(done.stdout.splitlines()) == [
        f"[{rank}] 0.28.1 2 3.0 ['--tf', 'input.json']" for rank in (0, 1)
    ], done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "is not used" in line]
    expected = "[0] gradring: horovod is gradring's here (GRADRING_AS_HOROVOD); the Horovod in "
    assert line.startswith(expected)
    assert "site-packages/horovod/__init__.py" in line


@pytest.mark.parametrize("how", ["variable", "script", "module", "program"])
def test_no_launcher_of_ours_is_needed(python: Path, tmp_path: Path, how: str) -> None:
    """As under srun and mpirun, which start a process that has to become the program."""
    program = names(tmp_path)
    starts = executable(tmp_path / "starts", f'#!/bin/sh\nexec {python} {program} "$@"\n')
    words = {
        "variable": [str(program)],
        "script": ["-m", "gradring.horovod", str(program)],
        "module": ["-m", "gradring.horovod", "-m", "names"],
        "program": ["-m", "gradring.horovod", str(starts)],
    }[how]
    variables = {"GRADRING_AS_HOROVOD": "1"} if how == "variable" else {}
    variables |= {"PYTHONPATH": str(tmp_path)} if how == "module" else {}
    done = launched(python, *words, "-m", "x y", **variables)
    assert done.stdout.splitlines() == [*SAID, "gradring.horovod ['-m', 'x y']"], done.stderr


@pytest.mark.parametrize("value", ["", "0", "no", " off "])
def test_without_the_variable_nothing_happens(python: Path, value: str) -> None:
    done = launched(python, "-c", "import horovod", GRADRING_AS_HOROVOD=value)
    assert done.stderr == "this is the real Horovod\n"


def test_an_interpreter_without_the_variable_imports_nothing_of_ours(python: Path) -> None:
    listed = "import sys; print([m for m in sys.modules if 'gradring' in m])"
    assert launched(python, "-c", listed).stdout == "[]\n"


def test_ranks_on_other_hosts_find_it_too(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names(tmp_path)
    ssh = ssh_stand_in.install(tmp_path)
    words = ["-m", "gradring", "run", "--as-horovod", "--hosts", "me@127.0.0.2:1", "names.py"]
    done = launched(python, *words, **ssh)
    assert done.stdout.splitlines()[-1] == "[0] gradring.horovod []", done.stderr


def test_a_wrong_value_is_refused_by_init(python: Path) -> None:
    program = "import horovod, gradring.horovod.basics as hvd; hvd.init()"
    done = launched(python, "-c", program, GRADRING_AS_HOROVOD="maybe")
    assert "ConfigError: GRADRING_AS_HOROVOD='maybe' is neither 1 nor 0; correct it" in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 2, "usage: python -m gradring.horovod [-m] PROGRAM ...\n"),
        (["-m"], 2, "usage: python -m gradring.horovod [-m] PROGRAM ...\n"),
        (["/there/x.py"], 127, "gradring.horovod: there is no file '/there/x.py'\n"),
        (["no-such"], 127, "gradring.horovod: there is no program 'no-such'; check its name and "),
    ],
)
def test_a_program_that_cannot_start_is_named(
    python: Path, words: list[str], code: int, said: str
) -> None:
    done = launched(python, "-m", "gradring.horovod", *words)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith(said)


@pytest.mark.parametrize(
    "words",
    [
        ["gradring", "run", "--as-horovod", "-np", "2"],
        ["gradring", "run", "--as-mwms", "-np", "2"],
        ["gradring", "run", "--with-strategy", "-np", "2"],
        ["gradring.horovod"],
    ],
)
def test_an_installation_without_the_hook_is_refused(tmp_path: Path, words: list[str]) -> None:
    python = environment_with_start_hook(tmp_path / "env")
    (hook,) = tmp_path.glob(f"env/lib/python3*/site-packages/{START.name}")
    hook.unlink()
    done = launched(python, "-m", *words, names(tmp_path))
    assert done.returncode == 2
    assert f"{python} has no gradring_start.pth among its packages" in done.stderr
    assert done.stderr.endswith("; install gradring by pip\n")
