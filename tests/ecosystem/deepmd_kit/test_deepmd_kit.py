"""deepmd-kit, as PyPI has it, trains on two ranks by `gradring run --as-horovod -np 2 dp ...`.

Its environment is made once, in ``.venv-deepmd``; it takes 2 GB.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from gradring.clusters import without_cluster_variables
from support.documents import ROOT
from support.installed import environment_with_start_hook
from support.waiting import wait_until

HERE = Path(__file__).parent
ENVIRONMENT = ROOT / ".venv-deepmd"
#: Its log of several processes needs mpi4py, whatever reduces.
REQUIREMENTS = ("deepmd-kit[cpu]==3.2.0", "tensorflow-cpu==2.21.0", "mpi4py", "mpich")
RANKS = ["-m", "gradring", "run", "--as-horovod", "-np", "2"]
TRAIN = ["--tf", "train", "input.json"]
STEPS = 40

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def python() -> Iterator[Path]:
    """The interpreter of deepmd-kit; no byte of its packages may change."""
    python = ENVIRONMENT / "bin" / "python"
    if not (ENVIRONMENT / "complete").exists():
        environment_with_start_hook(ENVIRONMENT, "--clear", pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *REQUIREMENTS], check=True)
        (ENVIRONMENT / "complete").touch()
    before = digest()
    yield python
    assert digest() == before


def digest() -> str:
    (package,) = ENVIRONMENT.glob("lib/python3*/site-packages/deepmd")
    files = [file for file in sorted(package.rglob("*")) if file.is_file()]
    parts = [file for file in files if file.suffix != ".pyc"]
    assert len(parts) > 500
    return hashlib.sha256(b"".join(map(Path.read_bytes, parts))).hexdigest()


def variables() -> dict[str, str]:
    threads = ("OMP_NUM_THREADS", "DP_INTRA_OP_PARALLELISM_THREADS")
    path = f"{ENVIRONMENT / 'bin'}{os.pathsep}{os.environ['PATH']}"
    own = {name: os.environ[name] for name in os.environ if name != "PYTHONPATH"}
    return {
        **without_cluster_variables(own),
        **dict.fromkeys([*threads, "DP_INTER_OP_PARALLELISM_THREADS"], "1"),
        "PATH": path,
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }


def run(directory: Path, *command: object) -> str:
    """What a program prints, in a directory, once it has ended well."""
    done = subprocess.run(
        list(map(str, command)),
        cwd=directory,
        env=variables(),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def prepared(python: Path, directory: Path, steps: int) -> Path:
    run(directory, python, HERE / "make_data.py", directory, steps)
    return directory


@pytest.fixture(scope="module")
def trained(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of `dp` on two ranks, in which nothing stands between."""
    directory = prepared(python, tmp_path_factory.mktemp("trained"), STEPS)
    run(directory, python, *RANKS, "dp", *TRAIN)
    return directory


def test_one_process_that_averages_both_ranks_batches_learns_the_same(
    python: Path, trained: Path
) -> None:
    told = json.loads(run(trained, python, HERE / "oracle.py", 2).splitlines()[-1])
    assert told["steps"] == STEPS
    assert told["changed"] > 0.01
    assert told["difference"] <= 1e-9
    assert told["loss"] == pytest.approx(told["loss_of_ranks"], abs=1e-6)
    # The comparison sees what one rank would learn by itself.
    alone = json.loads(run(trained, python, HERE / "oracle.py", 1).splitlines()[-1])
    assert alone["difference"] > 1e-4


def test_both_ranks_end_with_the_bits_of_the_checkpoint(
    python: Path, trained: Path, tmp_path: Path
) -> None:
    prepared(python, tmp_path, STEPS)
    run(tmp_path, python, *RANKS, HERE / "with_dump.py", *TRAIN)
    first, second = (np.load(tmp_path / f"variables-{rank}.npz") for rank in (0, 1))
    assert len(first.files) > 50 and first.files == second.files
    assert [name for name in first.files if bits(first[name]) != bits(second[name])] == []
    reader = (
        "import sys, numpy, tensorflow as tf\n"
        "found = tf.train.load_checkpoint(sys.argv[1])\n"
        "names = found.get_variable_to_shape_map()\n"
        "numpy.savez('checkpoint.npz', **{name: found.get_tensor(name) for name in names})\n"
    )
    run(tmp_path, python, "-c", reader, trained / f"model.ckpt-{STEPS}")
    written = np.load(tmp_path / "checkpoint.npz")
    assert sorted(written.files) == sorted(first.files)
    assert [name for name in first.files if bits(first[name]) != bits(written[name])] == []


def bits(array: Any) -> bytes:
    return bytes(array.tobytes())


def test_the_workflow_for_deepmd_kit_trains_on_two_ranks(python: Path, tmp_path: Path) -> None:
    workflow = yaml.safe_load((ROOT / "examples/deepmd_kit/parallel_training.yml").read_text())
    steps = {
        step["name"]: step for step in workflow["jobs"]["tensorflow"]["steps"] if "run" in step
    }
    assert list(steps) == ["Install", "Train", "Check that the ranks trained together"]
    directory = tmp_path / steps["Train"]["working-directory"]
    directory.mkdir(parents=True)
    prepared(python, directory, STEPS)
    # The data of this test stand where deepmd-kit has its own.
    (directory / "model_compression").mkdir()
    (directory / "input.json").rename(directory / "model_compression/input.json")
    for name in ("Train", "Check that the ranks trained together"):
        run(directory, "bash", "-e", "-o", "pipefail", "-c", steps[name]["run"])


def test_a_rank_that_is_killed_ends_the_other_with_the_error_that_names_it(
    python: Path, tmp_path: Path
) -> None:
    prepared(python, tmp_path, 1_000_000)
    launcher = subprocess.Popen(
        [python, *RANKS, "dp", *TRAIN],
        cwd=tmp_path,
        env=variables(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with launcher:
        curve = tmp_path / "lcurve.out"
        has_trained = re.compile(r"^ +50 ", re.MULTILINE)
        try:
            wait_until(
                lambda: curve.exists() and has_trained.search(curve.read_text()) is not None,
                "50 steps are done",
                within_s=900.0,
            )
            os.kill(rank_of(launcher.pid, 1), signal.SIGKILL)
            output, _ = launcher.communicate(timeout=120)
        finally:
            launcher.kill()
    assert launcher.returncode == 128 + signal.SIGKILL, output[-3000:]
    assert re.search(r"^\[0\] .*PeerLostError: .*rank 1 on \S+: ", output, re.MULTILINE)


def rank_of(launcher: int, rank: int) -> int:
    """The process of a rank."""
    wanted = f"GRADRING_RANK={rank}\0".encode()
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            status = (directory / "stat").read_text().rpartition(")")[2].split()
            found = wanted in (directory / "environ").read_bytes()
        except OSError:
            continue
        if found and int(status[1]) == launcher:
            return int(directory.name)
    raise AssertionError(f"{launcher} has no child that is rank {rank}")
