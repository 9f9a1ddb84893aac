"""Elastic jobs under a real Slurm: tasks that start again, lost nodes, and jobs that are requeued.

They run the batch scripts of the examples.
"""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster, slurm_cluster, why_not

from elastic.observed import WITHIN_S, Job
from support.commands import AS_PYTHON
from support.documents import ROOT
from support.waiting import wait_until

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def all_nodes_are_free_again(slurm: SlurmCluster) -> Iterator[None]:
    yield
    wait_until(slurm.idle, "the job has ended", WITHIN_S)


def submit(slurm: SlurmCluster, directory: Path, script: str) -> tuple[Job, str]:
    """The job of a batch script of the examples, and its number."""
    job = Job(directory, lambda: "".join(path.read_text() for path in directory.glob("*.out")))
    python = directory / "bin" / "python"
    python.parent.mkdir()
    python.write_text(AS_PYTHON)
    python.chmod(0o755)
    path = f"{python.parent}:{os.environ['PATH']}"
    script = str(ROOT / "examples" / "slurm" / script)
    there = ("sh", "-c", 'cd "$0" && exec "$@"', directory)
    done = slurm.run(*there, "sbatch", "--parsable", script, PATH=path)
    assert done.returncode == 0, done.stderr
    return job, done.stdout.strip()


def test_a_task_starts_again_in_its_place_and_joins_the_others(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    job, _ = submit(slurm, tmp_path, "elastic.sbatch")
    group = job.group(3)
    # Also the first one, at which the others have met.
    for rank in (1, 0):
        os.kill(group[rank]["pid"], signal.SIGKILL)
        group = job.group(3)
    assert len({each["node"] for each in group}) == 3
    job.ends(3)


def test_the_others_go_on_without_a_lost_node_and_a_further_step_joins(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    job, number = submit(slurm, tmp_path, "elastic.sbatch")
    job.group(3)
    (token,) = tmp_path.glob(".token-*")
    with slurm.without("node3"):
        assert sorted(each["node"] for each in job.group(2)) == ["node1", "node2"]
        # On a node that has a rank already, which listens at the port of the script.
        places = ("GRADRING_JOIN=node1:29500,node2:29500", "GRADRING_PORT=29501")
        proof = (f"GRADRING_JOB_ID={number}", f"GRADRING_TOKEN_FILE={token}")
        srun = ("srun", f"--jobid={number}", "--overlap", "-n", 1, "-w", "node2")
        step = slurm.start("env", *places, *proof, *srun, sys.executable, job.program)
        job.group(3)
        job.ends(3)
        assert step.wait(WITHIN_S) == 0


def test_a_job_that_is_requeued_goes_on_from_its_file(slurm: SlurmCluster, tmp_path: Path) -> None:
    job, number = submit(slurm, tmp_path, "elastic.sbatch")
    job.group(3)
    checkpoints = tmp_path / "checkpoints"
    wait_until(lambda: checkpoints.is_dir() and any(checkpoints.iterdir()), "there is a file")
    assert slurm.run("scontrol", "requeue", number).returncode == 0
    group = job.group(3)
    assert all(each["run"] == 1 and each["step"] > 0 for each in group)
    job.ends(3)


def test_a_rank_whose_node_is_lost_is_requeued_and_joins_the_others_from_another_one(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    job, _ = submit(slurm, tmp_path, "elastic-array.sbatch")
    lost = max(each["node"] for each in job.group(3))
    with slurm.without(lost):
        group = job.group(3)
        assert [each["run"] for each in group].count(1) == 1
        assert lost not in {each["node"] for each in group}
        job.ends(3)
