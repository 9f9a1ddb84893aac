"""Variables as real launchers set them, each in a file of its own under ``environments``.

Captured with ``env`` in a rank; only the launcher's own variables are kept, and names of hosts and
directories are made up.
"""

from pathlib import Path

import pytest

from gradring.clusters import Cluster, detect
from gradring.errors import ConfigError

ENVIRONMENTS = Path(__file__).parent / "environments"
MPIRUN_X = {"GRADRING_RENDEZVOUS": "node-a:29500"}
"""As ``mpirun -x GRADRING_RENDEZVOUS=node-a:29500`` adds it."""

PLACES = {
    "slurm-22.05-srun": (1, 3, "node1:61441", "Slurm step"),
    "slurm-22.05-srun-in-batch-script": (3, 4, "node1:61442", "Slurm step"),
    "slurm-22.05-srun-mpi-pmi2": (1, 2, "node1:61443", "Slurm step"),
    "slurm-22.05-batch-script": (0, 1, "127.0.0.1:0", "nothing"),
    "openmpi-4.1": (1, 2, "node-a:29500", "Open MPI"),
    "openmpi-4.1-in-slurm-batch-script": (2, 3, "node-a:29500", "Open MPI"),
    "torchrun-2.15": (1, 2, "localhost:43464", "torch-style variables"),
    "kubernetes-indexed-job": (2, 4, "train-0.train:29500", "GRADRING_* variables"),
    "kubernetes-tfjob": (1, 3, "mnist-worker-0.default.svc:2222", "TF_CONFIG"),
}


def read(name: str) -> dict[str, str]:
    rows = (ENVIRONMENTS / f"{name}.env").read_text().splitlines()
    return dict(row.split("=", 1) for row in rows if not row.startswith("#"))


@pytest.mark.parametrize("name", PLACES)
def test_a_real_environment_gives_its_cluster(name: str) -> None:
    environ = {**read(name), **(MPIRUN_X if name.startswith("openmpi") else {})}
    found: Cluster = detect(environ)
    assert (found.rank, found.world_size, found.rendezvous, found.source) == PLACES[name]


def test_every_environment_is_tested() -> None:
    assert {path.stem for path in ENVIRONMENTS.glob("*.env")} == set(PLACES)


def test_a_batch_script_is_told_about_srun() -> None:
    assert "srun would start 3 ranks" in detect(read("slurm-22.05-batch-script")).reason


def test_mpirun_without_a_rendezvous_is_told_what_to_add() -> None:
    with pytest.raises(ConfigError, match="mpirun -x GRADRING_RENDEZVOUS=node-a:29500"):
        detect(read("openmpi-4.1"))


def test_a_tf_job_listens_where_its_service_expects_it() -> None:
    assert detect(read("kubernetes-tfjob")).listen == "mnist-worker-1.default.svc:2222"
