"""Variables as real launchers set them, each in a file of its own under ``environments``.

Captured with ``env`` in a rank; only the launcher's own variables are kept, and names of hosts and
directories are made up.
"""

from pathlib import Path

import pytest

from gradring.clusters import Cluster, detect
from gradring.errors import ConfigError

ENVIRONMENTS = Path(__file__).parent / "environments"
GENV = {"GRADRING_RENDEZVOUS": "node-a:29500"}
"""As ``mpiexec -genv GRADRING_RENDEZVOUS node-a:29500`` adds it; else a rank asks mpiexec."""
HYDRA = ("mpich-4.0", "mpich-5.0", "intel-mpi-2021.18")

PLACES = {
    "slurm-22.05-srun": (1, 3, "node1:61441", "Slurm step"),
    "slurm-22.05-srun-in-batch-script": (3, 4, "node1:61442", "Slurm step"),
    "slurm-22.05-srun-mpi-pmi2": (1, 2, "node1:61443", "Slurm step"),
    "slurm-22.05-batch-script": (0, 1, "127.0.0.1:0", "nothing"),
    "openmpi-4.1": (1, 2, "127.0.0.1:65111", "Open MPI"),
    "openmpi-4.1-in-slurm-batch-script": (2, 3, "192.0.2.2:63672", "Open MPI"),
    "openmpi-5.0": (1, 2, "127.0.0.1:62442", "Open MPI"),
    "mpich-4.0": (1, 2, "node-a:29500", "PMI"),
    "mpich-5.0": (1, 2, "node-a:29500", "PMI"),
    "intel-mpi-2021.18": (1, 2, "node-a:29500", "PMI"),
    "torchrun-2.15": (1, 2, "localhost:43464", "torch-style variables"),
    "kubeflow-trainer-torch": (1, 2, "train-node-0-0.train:29500", "Kubeflow's PET_* variables"),
    "kubernetes-tfjob": (1, 3, "mnist-worker-0.default.svc:2222", "TF_CONFIG"),
}


def read(name: str) -> dict[str, str]:
    rows = (ENVIRONMENTS / f"{name}.env").read_text().splitlines()
    return dict(row.split("=", 1) for row in rows if not row.startswith("#"))


@pytest.mark.parametrize("name", PLACES)
def test_a_real_environment_gives_its_cluster(name: str) -> None:
    environ = {**read(name), **(GENV if name in HYDRA else {})}
    found: Cluster = detect(environ)
    assert (found.rank, found.world_size, found.rendezvous, found.source) == PLACES[name]


def test_every_environment_is_tested() -> None:
    assert {path.stem for path in ENVIRONMENTS.glob("*.env")} == set(PLACES)


def test_a_batch_script_is_told_about_srun() -> None:
    assert "srun would start 3 ranks" in detect(read("slurm-22.05-batch-script")).reason


@pytest.mark.parametrize("name", HYDRA)
def test_a_rank_that_cannot_ask_mpiexec_is_told_what_to_add(name: str) -> None:
    named = "PMI_FD is no socket to mpiexec in this process; .* -genv GRADRING_RENDEZVOUS node-a:"
    with pytest.raises(ConfigError, match=named):
        detect(read(name))


def test_a_port_of_our_own_is_that_of_rank_0_under_mpirun() -> None:
    assert detect({**read("openmpi-4.1"), "GRADRING_PORT": "7000-7003"}).rendezvous.endswith(
        ":7000"
    )


def test_rank_0_of_open_mpi_4_on_another_host_than_mpirun_says_so() -> None:
    environ = {**read("openmpi-4.1-in-slurm-batch-script"), "OMPI_COMM_WORLD_RANK": "0"}
    named = "but mpirun runs on 203.0.113.5, .* add -x GRADRING_RENDEZVOUS="
    elsewhere = {"OMPI_MCA_orte_hnp_uri": "1.0;tcp6://[2001:db8::7,fd00::1]:1"}
    with pytest.raises(ConfigError, match=named):
        detect({**environ, "OMPI_MCA_orte_hnp_uri": "1.0;tcp://203.0.113.5,10.0.0.1:5"})
    with pytest.raises(ConfigError, match="mpirun runs on 2001:db8::7"):
        detect({**environ, **elsewhere})
    assert detect({**environ, **elsewhere, "OMPI_COMM_WORLD_RANK": "1"}).rendezvous.startswith(
        "[2001"
    )


def test_a_tf_job_listens_where_its_service_expects_it() -> None:
    assert detect(read("kubernetes-tfjob")).listen == "mnist-worker-1.default.svc:2222"
