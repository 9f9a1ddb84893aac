"""Job ids, which tell a job from others that may use the same addresses."""

from __future__ import annotations

import socket

import pytest

from gradring.clusters import detect
from gradring.config import parse
from gradring.errors import ConfigError
from gradring.launch.ranks import rank_environments

OURS = {
    "GRADRING_RANK": "1",
    "GRADRING_WORLD_SIZE": "2",
    "GRADRING_RENDEZVOUS": "node-a:29500",
}
STEP = {
    "SLURM_JOB_ID": "100",
    "SLURM_STEP_ID": "3",
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NODELIST": "node[1-2]",
}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node-a", "MASTER_PORT": "29500"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "GRADRING_RENDEZVOUS": "node-a:29500",
}
CLUSTER = '{"cluster": {"chief": ["a:1"], "worker": ["b:2"]}, "task": {"type": "%s", "index": 0}}'
POD = {"GRADRING_WORLD_SIZE": "2"}
HOST = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2"}


@pytest.mark.parametrize(
    ("environ", "job_id"),
    [
        ({}, None),
        (OURS, None),
        ({**OURS, "GRADRING_JOB_ID": " mine "}, "mine"),
        (STEP, "slurm 100.3"),
        ({**STEP, "SLURM_HET_JOB_ID": "99"}, "slurm 99.3"),
        ({**STEP, "GRADRING_JOB_ID": "mine"}, "mine"),
        (TORCHRUN, None),
        ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "7f"}, "7f"),
        (OPEN_MPI, None),
        ({**OPEN_MPI, "PMIX_NAMESPACE": "prterun-node-a-17@1"}, "prterun-node-a-17@1"),
        ({"TF_CONFIG": CLUSTER % "chief"}, "TF_CONFIG a:1,b:2"),
        ({"TF_CONFIG": CLUSTER % "worker"}, "TF_CONFIG a:1,b:2"),
        ({"TF_CONFIG": CLUSTER % "worker", "GRADRING_JOB_ID": "mine"}, "mine"),
        # Later processes of an elastic job may be told of others.
        ({"TF_CONFIG": CLUSTER % "worker", "GRADRING_JOIN": "auto"}, None),
        (HOST, None),
        ({**HOST, "TRAINING_JOB_NAME": "mnist-7"}, "mnist-7"),
    ],
)
def test_the_launcher_of_a_job_names_it(environ: dict[str, str], job_id: str | None) -> None:
    assert detect(environ).job_id == job_id


def test_the_names_of_pods_name_their_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getfqdn", lambda name: f"{name}.jobs")
    ids = [
        detect({**POD, "JOB_COMPLETION_INDEX": str(index), "HOSTNAME": f"train-{index}"}).job_id
        for index in range(2)
    ]
    assert ids == ["pods train-0.jobs:29500"] * 2


def test_every_start_by_our_launcher_is_a_job_of_its_own() -> None:
    environ = {"GRADRING_JOB_ID": "of an outer launcher"}
    first, second = rank_environments(environ, 2), rank_environments(environ, 2)
    ids = [detect(ours).job_id for ours in (*first, *second)]
    assert ids[0] == ids[1] != ids[2] == ids[3]
    assert None not in ids and "of an outer launcher" not in ids


def test_a_long_name_is_shortened_and_stays_different() -> None:
    one, other = (parse.job_id("x" * 500 + end) for end in "ab")
    assert one != other and len(one) == len(other) == parse.MAX_JOB_ID
    assert parse.job_id("slurm 1.0") == "slurm 1.0"
    assert len(parse.job_id("\N{SNOWMAN}" * 40).encode()) <= parse.MAX_JOB_ID + 2
    for wrong in ("", " ", 7, b"x"):
        with pytest.raises(ConfigError, match="job_id="):
            parse.job_id(wrong)
