"""``srun -n N python train.py`` with no other setting, on a real Slurm cluster of three nodes."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import NODES, SlurmCluster, slurm_cluster, why_not

from support.documents import programs

TRAINING_S = 240.0

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


def program(directory: Path, text: str) -> tuple[str, ...]:
    path = directory / "train.py"
    path.write_text(text)
    return sys.executable, str(path)


def test_the_numpy_program_of_the_quick_start_reduces_over_three_nodes(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    train = program(tmp_path, programs()["sum.py"])
    done = slurm.run("srun", "-l", "-n", 3, "-N", 3, *train)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for rank in range(3):
        assert f"{rank}: {rank} 3 1.0" in lines


def test_the_training_program_of_the_quick_start_trains(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    train = program(tmp_path, programs()["train.py"])
    done = slurm.run("srun", "-l", "-n", 2, "-N", 2, *train, timeout_s=TRAINING_S)
    assert done.returncode == 0, done.stderr
    losses = [re.findall(rf"^{rank}: ([0-9.e+-]+)$", done.stdout, re.M) for rank in (0, 1)]
    assert len(losses[0]) == 10 and losses[0] == losses[1]
    assert float(losses[0][-1]) < float(losses[0][0])


def test_two_steps_of_one_job_do_not_meet(slurm: SlurmCluster, tmp_path: Path) -> None:
    text = (
        "import gradring, numpy as np, os\n"
        "with gradring.init() as comm:\n"
        "    step = int(os.environ['SLURM_STEP_ID'])\n"
        "    print('sum', step, comm.all_reduce(np.array([10 ** step]))[0])\n"
    )
    train = " ".join(f"'{word}'" for word in program(tmp_path, text))
    srun = f"srun --overlap --overcommit -n 2 -N 2 {train}"
    done = slurm.run("salloc", "-n", 2, "-N", 2, "sh", "-c", f"{srun} & {srun} & wait")
    sums = sorted(line for line in done.stdout.splitlines() if line.startswith("sum"))
    assert sums == ["sum 0 2", "sum 0 2", "sum 1 20", "sum 1 20"], done.stderr


def test_a_killed_task_is_named_by_the_others(slurm: SlurmCluster, tmp_path: Path) -> None:
    text = (
        "import gradring, numpy as np, os, signal\n"
        "from pathlib import Path\n"
        "try:\n"
        "    with gradring.init() as comm:\n"
        "        if comm.rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "        comm.all_reduce(np.ones(5))\n"
        "except gradring.errors.PeerLostError as error:\n"
        "    lost = Path(__file__).with_name('lost-' + os.environ['SLURM_PROCID'])\n"
        "    lost.write_text(str(error))\n"
        "    raise\n"
    )
    train = program(tmp_path, text)
    done = slurm.run("srun", "-l", "--kill-on-bad-exit=0", "-n", 3, "-N", 3, *train)
    assert done.returncode != 0
    # srun itself may lose the last lines of tasks whose job step it declares dead.
    lost = {path.name: path.read_text() for path in tmp_path.glob("lost-*")}
    assert sorted(lost) == ["lost-0", "lost-2"], done.stderr
    assert all("rank 1 on " in text for text in lost.values()), lost


def test_env_and_doctor_explain_the_step(slurm: SlurmCluster) -> None:
    gradring = (sys.executable, "-m", "gradring")
    done = slurm.run("srun", "-n", 3, "-N", 3, *gradring, "env")
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"^rank +(\d)$", done.stdout, re.M)) == ["0", "1", "2"]
    assert re.search(
        r"^because +this is task 2 of 3 of step 0 of Slurm job \d+\.$", done.stdout, re.M
    )
    done = slurm.run("srun", "-n", 3, "-N", 3, *gradring, "doctor")
    assert "Slurm step: this is task 0 of 3" in done.stdout
    measured = re.findall(r"^(\d-\d) +\d+ us +[\d.]+ GB/s", done.stdout, re.M)
    assert measured == ["0-1", "0-2", "1-2"], done.stdout + done.stderr
    # Of nodes that share a busy machine, one may be slow.
    problems = re.findall(r"^problem: (.*)$", done.stdout, re.M)
    assert all(" is slow: " in problem for problem in problems), problems
    assert done.returncode == (1 if problems else 0)


def test_the_cluster_has_three_nodes(slurm: SlurmCluster) -> None:
    done = slurm.run("srun", "-n", 3, "-N", 3, "printenv", "SLURMD_NODENAME")
    assert sorted(done.stdout.split()) == list(NODES)
