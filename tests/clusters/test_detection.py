"""Each launcher's variables, as they really are, and the cluster that they describe."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping

import pytest

from gradring.clusters import detect, signs, without_cluster_variables
from gradring.errors import ConfigError

OURS = {
    "GRADRING_RANK": "2",
    "GRADRING_WORLD_SIZE": "4",
    "GRADRING_RENDEZVOUS": "10.0.0.5:29500",
}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "3",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node-a",
    "MASTER_PORT": "29400",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "1",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "9", "MPI_LOCALRANKID": "1"}
JAX = {
    "JAX_PROCESS_ID": "1",
    "JAX_NUM_PROCESSES": "3",
    "JAX_COORDINATOR_ADDRESS": "train-node-0-0.train:29500",
}
KERAS = {
    "KERAS_DISTRIBUTION_PROCESS_ID": "1",
    "KERAS_DISTRIBUTION_NUM_PROCESSES": "2",
    "KERAS_DISTRIBUTION_JOB_ADDRESSES": "10.0.0.1:1234,10.0.0.2:2345",
}
PET = {
    "PET_NODE_RANK": "1",
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_MASTER_ADDR": "train-node-0-0.train",
    "PET_MASTER_PORT": "29500",
}
SAGEMAKER = {"SM_HOSTS": '["algo-2", "algo-1", "algo-10"]', "SM_CURRENT_HOST": "algo-2"}
POD = {"JOB_COMPLETION_INDEX": "1", "HOSTNAME": "localhost", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}


def tf_config(rank: int, world_size: int) -> dict[str, str]:
    workers = [f"10.0.0.{5 + i}:2222" for i in range(world_size)]
    task = {"type": "worker", "index": rank}
    return {"TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": task})}


def slurm(rank: int, world_size: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "4242",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": str(world_size),
        "SLURM_STEP_NUM_TASKS": str(world_size),
        "SLURM_STEP_NODELIST": "gpu[03-04]",
    }


def facts(environ: Mapping[str, str]) -> tuple[int, int, str, str | None, str]:
    found = detect(environ)
    return found.rank, found.world_size, found.rendezvous, found.listen, found.source


GOLDEN = {
    "our variables": (OURS, (2, 4, "10.0.0.5:29500", None, "GRADRING_* variables")),
    "TF_CONFIG": (tf_config(1, 2), (1, 2, "10.0.0.5:2222", "10.0.0.6:2222", "TF_CONFIG")),
    "torchrun": (TORCHRUN, (3, 8, "node-a:29400", None, "torch-style variables")),
    "torchrun with its agent's store at the port": (
        {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"},
        (3, 8, "node-a:29401", None, "torch-style variables"),
    ),
    "torch-style variables with an IPv6 master": (
        {**TORCHRUN, "MASTER_ADDR": "fd00::7"},
        (3, 8, "[fd00::7]:29400", None, "torch-style variables"),
    ),
    "Slurm": (slurm(1, 2), (1, 2, "gpu03:61586", None, "Slurm step")),
    "Open MPI with our rendezvous": (
        {**OPEN_MPI, "GRADRING_RENDEZVOUS": "node-a:29500"},
        (1, 2, "node-a:29500", None, "Open MPI"),
    ),
    "Open MPI with a torch-style master": (
        {**OPEN_MPI, "MASTER_ADDR": "node-a", "MASTER_PORT": "29400"},
        (1, 2, "node-a:29400", None, "Open MPI"),
    ),
    "Open MPI of one rank": (
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        (0, 1, "127.0.0.1:0", None, "Open MPI"),
    ),
    "MPICH or Intel MPI": (
        {**HYDRA, "GRADRING_RENDEZVOUS": "node-a:29500"},
        (1, 2, "node-a:29500", None, "PMI"),
    ),
    "JAX": (JAX, (1, 3, "train-node-0-0.train:29500", None, "JAX variables")),
    "Keras": (KERAS, (1, 2, "10.0.0.1:1234", None, "Keras variables")),
    "Keras, told of rank 0 only": (
        {**KERAS, "KERAS_DISTRIBUTION_JOB_ADDRESSES": "[fd00::7]:1234"},
        (1, 2, "[fd00::7]:1234", None, "Keras variables"),
    ),
    "Kubeflow's PET variables without torchrun": (
        {**PET, **POD},
        (1, 2, "train-node-0-0.train:29500", None, "Kubeflow's PET_* variables"),
    ),
    "torchrun in a pod with PET variables": (
        {**PET, **POD, **TORCHRUN},
        (3, 8, "node-a:29400", None, "torch-style variables"),
    ),
    "one node of Kubeflow is alone": (
        {**POD, "PET_NODE_RANK": "0", "PET_NNODES": "1"},
        (0, 1, "127.0.0.1:0", None, "Kubeflow's PET_* variables"),
    ),
    "SageMaker, where each host is a rank": (
        SAGEMAKER,
        (2, 3, "algo-1:29500", None, "SageMaker"),
    ),
    "mpirun on SageMaker's hosts": (
        {**SAGEMAKER, **OPEN_MPI, "GRADRING_RENDEZVOUS": "algo-1:1"},
        (1, 2, "algo-1:1", None, "Open MPI"),
    ),
    "an Indexed Job with the address of rank 0": (
        {**POD, "GRADRING_WORLD_SIZE": "4", "GRADRING_RENDEZVOUS": "train-0.train:1"},
        (1, 4, "train-0.train:1", None, "Kubernetes Indexed Job"),
    ),
    "pods of an Indexed Job that are to train alone": (
        {**POD, "GRADRING_WORLD_SIZE": "1"},
        (0, 1, "127.0.0.1:0", None, "Kubernetes Indexed Job"),
    ),
    "our variables in a pod of an Indexed Job": (
        {**OURS, **POD},
        (2, 4, "10.0.0.5:29500", None, "GRADRING_* variables"),
    ),
    "mpirun in a pod of an Indexed Job": (
        {**OPEN_MPI, "PMIX_NAMESPACE": "1@1", **POD, "GRADRING_PORT": "29500-29501"},
        (1, 2, "127.0.0.1:29500", None, "Open MPI"),
    ),
    "our rendezvous moves that of JAX": (
        {**JAX, "GRADRING_RENDEZVOUS": "node-a:1"},
        (1, 3, "node-a:1", None, "JAX variables"),
    ),
    "numbers with leading zeros": (
        {**OURS, "GRADRING_RANK": "02", "GRADRING_RENDEZVOUS": "node-a:029500"},
        (2, 4, "node-a:29500", None, "GRADRING_* variables"),
    ),
    "a world of one by our variables": (
        {"GRADRING_RANK": "0", "GRADRING_WORLD_SIZE": "1"},
        (0, 1, "127.0.0.1:0", None, "GRADRING_* variables"),
    ),
    "nothing": ({"PATH": "/bin"}, (0, 1, "127.0.0.1:0", None, "nothing")),
    "blank variables count as unset": (
        {"GRADRING_RANK": "", "RANK": " "},
        (0, 1, "127.0.0.1:0", None, "nothing"),
    ),
    "the launcher's variables and an agreeing TF_CONFIG": (
        {**OURS, **tf_config(2, 4)},
        (2, 4, "10.0.0.5:29500", None, "GRADRING_* variables"),
    ),
    "our rendezvous moves that of TF_CONFIG": (
        {**tf_config(0, 2), "GRADRING_RENDEZVOUS": "10.0.0.5:3333"},
        (0, 2, "10.0.0.5:3333", None, "TF_CONFIG"),
    ),
    "our rendezvous moves that of Slurm": (
        {**slurm(1, 2), "GRADRING_RENDEZVOUS": "ib-gpu03:3333"},
        (1, 2, "ib-gpu03:3333", None, "Slurm step"),
    ),
    "Slurm's PMI agrees with its step": (
        {**slurm(1, 2), "PMI_RANK": "1", "PMI_SIZE": "2"},
        (1, 2, "gpu03:61586", None, "Slurm step"),
    ),
    "Open MPI's daemons are a Slurm step but the ranks are those of MPI": (
        {**slurm(0, 2), **OPEN_MPI, "GRADRING_RENDEZVOUS": "node-a:29500"},
        (1, 2, "node-a:29500", None, "Open MPI"),
    ),
    "an environment that loses needs no address": (
        {**OURS, "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"},
        (2, 4, "10.0.0.5:29500", None, "GRADRING_* variables"),
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_each_environment_gives_its_cluster(name: str) -> None:
    environ, expected = GOLDEN[name]
    assert facts(environ) == expected
    assert detect(environ).reason.endswith(".")


@pytest.mark.parametrize(
    ("environ", "first", "second"),
    [
        ({**OURS, **tf_config(1, 4)}, "rank 2 of 4", "rank 1 of 4"),
        ({**OURS, **TORCHRUN}, "rank 2 of 4", "rank 3 of 8"),
        ({**tf_config(1, 2), **slurm(0, 2)}, "rank 1 of 2 according to TF_CONFIG", "Slurm step;"),
        (
            {**slurm(1, 2), "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
            "rank 1 of 2 according to Slurm step",
            "rank 0 of 1 according to Open MPI",
        ),
        (
            {**slurm(1, 2), "MPI_LOCALRANKID": "0", "PMI_RANK": "0", "PMI_SIZE": "1"},
            "rank 1 of 2 according to Slurm step",
            "rank 0 of 1 according to PMI",
        ),
        ({**OURS, **KERAS}, "rank 2 of 4", "rank 1 of 2 according to Keras"),
        ({**TORCHRUN, **OPEN_MPI}, "according to torch-style", "rank 1 of 2 according to Open"),
    ],
)
def test_environments_that_disagree_are_an_error_that_prints_both(
    environ: dict[str, str], first: str, second: str
) -> None:
    with pytest.raises(ConfigError, match="unset the one that is wrong") as caught:
        detect(environ)
    assert first in str(caught.value) and second in str(caught.value)


MASTER = "Rank 0's address in MASTER_ADDR and MASTER_PORT, node-a:2940{}, does not count."
TF_CONFIG = "Rank 0's address in TF_CONFIG, 10.0.0.5:2222, does not count."
JAX_COORDINATOR = (
    "Rank 0's address in JAX_COORDINATOR_ADDRESS, train-node-0-0.train:29500, does not count."
)
KERAS_ADDRESS = (
    "Rank 0's address in KERAS_DISTRIBUTION_JOB_ADDRESSES, 10.0.0.1:1234, does not count."
)
AGENT = {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}
MOVED = {"GRADRING_RENDEZVOUS": "node-b:1"}


@pytest.mark.parametrize(
    ("environ", "overruled"),
    [
        ({**OURS, **TORCHRUN, "RANK": "2", "WORLD_SIZE": "4"}, [MASTER.format(0)]),
        ({**OURS, **tf_config(2, 4)}, [TF_CONFIG]),
        ({**TORCHRUN, **MOVED, **tf_config(3, 8)}, [TF_CONFIG, MASTER.format(0)]),
        ({**TORCHRUN, **tf_config(3, 8)}, [MASTER.format(0)]),
        ({**slurm(3, 8), "MASTER_ADDR": "node-a", "MASTER_PORT": "29400"}, [MASTER.format(0)]),
        ({**AGENT, **MOVED}, [MASTER.format(1)]),
        ({**MOVED, **JAX}, [JAX_COORDINATOR]),
        ({**JAX, **TORCHRUN, "RANK": "1", "WORLD_SIZE": "3"}, [JAX_COORDINATOR]),
        ({**MOVED, **KERAS}, [KERAS_ADDRESS]),
        (AGENT, []),
        ({**OPEN_MPI, "MASTER_ADDR": "node-a", "MASTER_PORT": "29400"}, []),
        ({**OURS, **tf_config(2, 4), "GRADRING_RENDEZVOUS": "10.0.0.5:2222"}, []),
        ({**OURS, "MASTER_ADDR": "node-a"}, []),
        ({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", **tf_config(0, 1)}, []),
    ],
)
def test_the_reason_names_the_addresses_that_do_not_count(
    environ: dict[str, str], overruled: list[str]
) -> None:
    first, *others = re.split(r"(?<=\.) (?=Rank 0)", detect(environ).reason)
    assert others == overruled
    assert "does not count" not in first


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"GRADRING_RANK": "1"}, "GRADRING_WORLD_SIZE is not"),
        ({"GRADRING_WORLD_SIZE": "2"}, "GRADRING_RANK is not"),
        ({"GRADRING_RANK": "1", "GRADRING_WORLD_SIZE": "2"}, "GRADRING_RENDEZVOUS is not"),
        ({"GRADRING_RENDEZVOUS": "a:1"}, "set GRADRING_RANK and GRADRING_WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "RANK is not"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT are not"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "MASTER_PORT is not"),
        ({"MASTER_ADDR": "a"}, "set RANK and WORLD_SIZE"),
        (OPEN_MPI, "set GRADRING_RENDEZVOUS"),
        (HYDRA, "PMI_FD is no socket to mpiexec in this process; set GRADRING_RENDEZVOUS"),
        ({"JAX_NUM_PROCESSES": "2"}, "JAX_PROCESS_ID is not"),
        ({**JAX, "JAX_COORDINATOR_ADDRESS": ""}, "JAX_COORDINATOR_ADDRESS is not"),
        ({**JAX, "JAX_COORDINATOR_ADDRESS": "node-a"}, "JAX_COORDINATOR_ADDRESS='node-a' is not h"),
        ({"JAX_COORDINATOR_ADDRESS": "a:1"}, "set JAX_PROCESS_ID and JAX_NUM_PROCESSES"),
        ({"KERAS_DISTRIBUTION_PROCESS_ID": "0"}, "KERAS_DISTRIBUTION_NUM_PROCESSES is not"),
        ({**KERAS, "KERAS_DISTRIBUTION_JOB_ADDRESSES": ""}, "JOB_ADDRESSES is not; set it to the"),
        ({**KERAS, "KERAS_DISTRIBUTION_JOB_ADDRESSES": "10.0.0.1,b:1"}, "='10.0.0.1' is not host:"),
        ({"KERAS_DISTRIBUTION_JOB_ADDRESSES": "a:1,b:1"}, "set KERAS_DISTRIBUTION_PROCESS_ID and"),
        ({"PET_NNODES": "2"}, "PET_NODE_RANK is not"),
        ({**PET, "PET_MASTER_ADDR": " "}, "PET_MASTER_ADDR is not"),
        ({**PET, "PET_MASTER_ADDR": "", "PET_MASTER_PORT": ""}, "set GRADRING_RENDEZVOUS"),
        ({**PET, "PET_NNODES": "1:4"}, "is a range, .* start it with torchrun"),
        (POD, "set GRADRING_WORLD_SIZE to the Job's completions, or to 1"),
        ({**POD, "GRADRING_WORLD_SIZE": "1x"}, "GRADRING_WORLD_SIZE='1x' is not"),
        ({**POD, "GRADRING_RANK": "1"}, "GRADRING_WORLD_SIZE is not"),
        (
            {**POD, "GRADRING_WORLD_SIZE": "2"},
            "rank 1 cannot tell the name of the pod with index 0 from its own, 'localhost'; give",
        ),
        ({**SAGEMAKER, "SM_CURRENT_HOST": "algo-3"}, "SM_CURRENT_HOST='algo-3' is not one of"),
        ({**SAGEMAKER, "SM_HOSTS": "algo-1"}, "SM_HOSTS='algo-1' is not a JSON list"),
        ({"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "2"}, "MVAPICH says rank 0 of 2"),
        ({"JSM_NAMESPACE_RANK": "0", "JSM_NAMESPACE_SIZE": "2"}, "jsrun says rank 0 of 2"),
        ({"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "2"}, "Flux says rank 0 of 2"),
        ({"PMI_RANK": "1"}, "PMI_SIZE is not"),
        ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}, "SLURM_PROCID is not"),
    ],
)
def test_a_partial_set_is_an_error_that_names_what_is_missing(
    environ: dict[str, str], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        detect(environ)


SIGNS = {
    "LOCAL_WORLD_SIZE": ("2", "1"),
    "LOCAL_RANK": ("1", "0"),
    "GROUP_RANK": ("1", "0"),
    "NODE_RANK": ("3", "0"),
    "HOROVOD_SIZE": ("4", "1"),
    "SLURM_PROCID": ("1", "0"),
    "PMIX_RANK": ("1", "0"),
    "MPI_LOCALNRANKS": ("2", "1"),
    "MPI_LOCALRANKID": ("1", "none"),
    "PALS_RANKID": ("7", ""),
    "ALPS_APP_PE": ("1", "-1"),
    "TPU_WORKER_ID": ("1", "0"),
}


@pytest.mark.parametrize("name", SIGNS)
def test_a_process_that_is_one_of_several_never_trains_alone_by_accident(name: str) -> None:
    several, alone = SIGNS[name]
    with pytest.raises(ConfigError, match=f"{name}='{several}' says .* start with gradring run"):
        detect({name: several})
    assert detect({name: alone}).source == "nothing"
    ours = {"GRADRING_RANK": "0", "GRADRING_WORLD_SIZE": "1"}
    assert detect({name: several, **ours}).world_size == 1


def test_all_signs_are_tested() -> None:
    assert SIGNS.keys() == signs.NUMBERS.keys()


def test_a_pod_calls_rank_0_by_the_name_of_the_headless_service(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = {"train-1": "train-1.train.default.svc.cluster.local", "train-11": "train-11"}
    monkeypatch.setattr("socket.getfqdn", names.__getitem__)
    pod = {**POD, "HOSTNAME": "train-1", "GRADRING_WORLD_SIZE": "12"}
    assert detect(pod).rendezvous == "train-0.train.default.svc.cluster.local:29500"
    moved = {**pod, "GRADRING_PORT": "7000"}
    assert detect(moved).rendezvous == "train-0.train.default.svc.cluster.local:7000"
    # Where the others listen is known if their port is.
    names_of_pods = [f"train-{index}.train.default.svc.cluster.local" for index in range(12)]
    assert detect(moved).addresses == tuple(f"{name}:7000" for name in names_of_pods)
    assert detect(pod).addresses == ()
    with pytest.raises(ConfigError, match="headless service"):
        detect({**pod, "HOSTNAME": "train-11", "JOB_COMPLETION_INDEX": "11"})


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"GRADRING_RANK": "4"}, "GRADRING_RANK=4 is too large for GRADRING_WORLD_SIZE=4"),
        ({"GRADRING_RANK": "-1"}, "GRADRING_RANK='-1' is not a whole number"),
        ({"GRADRING_RANK": "9" * 5000}, "not a whole number"),
        (
            {"GRADRING_WORLD_SIZE": "0"},
            "GRADRING_WORLD_SIZE=0 is not a whole number from 1 to 2048",
        ),
        ({"GRADRING_RENDEZVOUS": "node-a"}, "GRADRING_RENDEZVOUS='node-a' is not host:port"),
        ({"GRADRING_RENDEZVOUS": ":29500"}, "is not host:port"),
        ({"GRADRING_RENDEZVOUS": "\udcff:29500"}, "is not host:port"),
        ({"GRADRING_RENDEZVOUS": "fd00::7:29500"}, "is not host:port"),
        ({"GRADRING_RENDEZVOUS": "node-a..svc:29500"}, "is not host:port"),
        ({"GRADRING_RENDEZVOUS": f"{'a' * 64}.svc:29500"}, "is not host:port"),
        ({"GRADRING_RENDEZVOUS": "node-a:70000"}, "no port between 1 and 65535"),
        ({"GRADRING_RENDEZVOUS": "node-a:0"}, "no port between 1 and 65535"),
    ],
)
def test_a_malformed_variable_is_an_error_that_names_it(
    changed: dict[str, str], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        detect({**OURS, **changed})


@pytest.mark.parametrize(
    ("environ", "outer"),
    [
        (slurm(1, 4), "rank 1 of 4 (Slurm step)"),
        pytest.param(OPEN_MPI, "rank 1 of 2 (Open MPI)", marks=pytest.mark.slow),
        pytest.param(HYDRA, "rank 1 of 2 (PMI)", marks=pytest.mark.slow),
        ({**PET, **POD}, "rank 1 of 2 (Kubeflow's PET_* variables)"),
        pytest.param(POD, None, marks=pytest.mark.slow),
        pytest.param(tf_config(0, 1), None, marks=pytest.mark.slow),
        ({}, None),
    ],
)
def test_our_launcher_inside_another_makes_a_group_and_says_so(
    environ: dict[str, str], outer: str | None
) -> None:
    """``srun -n 4 gradring run -np 1 ...``: four groups, which may be meant."""
    kept = without_cluster_variables(os.environ)
    show = ["-m", "gradring", "run", "-np", "1", "--", sys.executable, "-m", "gradring", "env"]
    done = subprocess.run(
        [sys.executable, *show], env={**kept, **environ}, capture_output=True, text=True, check=True
    )
    assert re.search(r"^\[0\] found in +GRADRING_\* variables$", done.stdout, re.M)
    said = f"gradring run: this is {outer}, and each of them starts a group of its own with 1 rank"
    assert done.stderr.startswith(said) if outer else not done.stderr


def test_the_children_of_a_launcher_inherit_no_place() -> None:
    launchers = {**TORCHRUN, **slurm(5, 6), **OPEN_MPI, **HYDRA, **JAX, **PET}
    everything = {**OURS, **tf_config(1, 2), **launchers, **dict.fromkeys(SIGNS, "2")}
    left = without_cluster_variables(everything)
    assert detect(left).source == "nothing"
    assert left["SLURM_JOB_ID"] == "4242"
