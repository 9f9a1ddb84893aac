"""The batch script and the image of examples/, as far as they go without Slurm and Docker."""

from __future__ import annotations

import os
import re
import stat
import subprocess
from pathlib import Path

import yaml

from gradring.clusters import without_cluster_variables
from support.commands import AS_PYTHON
from support.documents import ROOT, programs

SCRIPT = ROOT / "examples" / "slurm" / "train.sbatch"
DOCKERFILE = ROOT / "examples" / "docker" / "Dockerfile"

# Starts what srun would start as two tasks of a step, each with a task's variables.
SRUN = """#!/bin/sh
test "$1" = --cpus-per-task=1 || exit 9
shift
ls -l "$GRADRING_TOKEN_FILE" > token-while-running
for task in 0 1; do
    SLURM_STEP_ID=0 SLURM_PROCID=$task SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=localhost "$@" &
done
wait
"""


def test_the_batch_script_starts_its_ranks_with_srun_and_a_secret(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(programs()["sum.py"])
    for name, text in {"srun": SRUN, "python": AS_PYTHON}.items():
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_CPUS_PER_TASK": "1", "SLURM_NTASKS": "2"}
    done = subprocess.run(
        ["bash", SCRIPT],
        cwd=tmp_path,
        env={
            **without_cluster_variables(os.environ),
            **job,
            "SLURM_SUBMIT_DIR": str(tmp_path),
            # A rank prints whole lines only where its output is buffered.
            "PYTHONUNBUFFERED": "",
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 2 0.5", "1 2 0.5"]
    assert (tmp_path / "token-while-running").read_text().startswith("-rw-------")
    assert not list(tmp_path.glob(".token*"))


def test_the_batch_script_asks_for_what_it_uses() -> None:
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", SCRIPT.read_text(), re.M))
    assert len(options) == SCRIPT.read_text().count("#SBATCH")
    # SLURM_CPUS_PER_TASK is set only for a job that asks for it.
    assert options.keys() == {
        "job-name",
        "nodes",
        "ntasks-per-node",
        "cpus-per-task",
        "time",
        "output",
    }
    assert stat.S_ISREG(SCRIPT.stat().st_mode)


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile, in their order."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.M).replace("\\\n", " ")
    return [(word, rest) for word, rest in re.findall(r"^([A-Z]+) (.*)$", text, re.M)]


def test_the_commands_of_the_image_are_commands() -> None:
    found = instructions()
    assert [word for word, _ in found] == [
        *("FROM", "COPY", "RUN", "RUN", "USER", "WORKDIR", "COPY", "ENV", "CMD")
    ]
    for word, rest in found:
        if word == "RUN":
            subprocess.run(["sh", "-n", "-c", rest], check=True)
    assert dict(found)["CMD"] == '["python", "train.py"]'


def test_the_image_has_a_python_that_gradring_supports() -> None:
    (version,) = re.findall(r"^python:(3\.\d+)-slim$", dict(instructions())["FROM"])
    assert f'"Programming Language :: Python :: {version}"' in (ROOT / "pyproject.toml").read_text()


def test_the_manifests_run_the_image_as_its_user() -> None:
    user = int(dict(instructions())["USER"])
    for name in ("indexed-job.yaml", "elastic-job.yaml", "tfjob.yaml"):
        text = (ROOT / "examples" / "kubernetes" / name).read_text()
        assert list(yaml.safe_load_all(text))
        assert set(re.findall(r"runAsUser: (\d+)", text)) == {str(user)}


def test_the_wheel_of_the_image_is_installed_with_an_extra(tmp_path: Path) -> None:
    (install,) = (rest for word, rest in instructions() if word == "RUN" and "pip" in rest)
    wheel = tmp_path / "gradring-0.1.0-cp310-abi3-manylinux_2_28_x86_64.whl"
    wheel.touch()
    (tmp_path / "pip").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "pip").chmod(0o755)
    done = subprocess.run(
        ["sh", "-c", install.replace("/tmp/gradring", f"{tmp_path}/gradring")],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["install", "--no-cache-dir", f"{wheel}[tensorflow]"]
    assert not wheel.exists()
