"""Slurm: node lists, and which processes of a job are ranks."""

import pytest

from gradring.clusters import detect
from gradring.clusters.slurm import expand_nodelist
from gradring.errors import ConfigError

STEP = {
    "SLURM_JOB_ID": "100",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NODELIST": "node[1-2]",
}


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("login", ["login"]),
        ("a,b", ["a", "b"]),
        ("gpu[01-03,7],login", ["gpu01", "gpu02", "gpu03", "gpu7", "login"]),
        ("n[099-101]", ["n099", "n100", "n101"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("c[1,3]-ib.example", ["c1-ib.example", "c3-ib.example"]),
    ],
)
def test_a_node_list_expands_to_its_hosts(text: str, hosts: list[str]) -> None:
    assert expand_nodelist(text) == hosts


@pytest.mark.parametrize(
    "text",
    [
        "",
        "n[1-",
        "n1-2]",
        "n[2-1]",
        "n[a]",
        "n[]",
        "a,,b",
        "n[1-9999999]",
        "n[1-999]m[1-999]",
        "[[",
    ],
)
def test_a_malformed_or_huge_node_list_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match="SLURM_STEP_NODELIST"):
        expand_nodelist(text)


def test_tasks_of_a_step_agree_on_an_address_and_steps_do_not_share_it() -> None:
    others = [detect({**STEP, "SLURM_PROCID": str(rank)}).rendezvous for rank in range(4)]
    next_step = detect({**STEP, "SLURM_STEP_ID": "1"}).rendezvous
    next_job = detect({**STEP, "SLURM_JOB_ID": "101"}).rendezvous
    assert set(others) == {"node1:61540"}
    assert len({others[0], next_step, next_job}) == 3


@pytest.mark.parametrize(
    "changed",
    [
        {"SLURM_STEP_ID": "", "SLURM_PROCID": "0"},
        {"SLURM_STEP_ID": str(0xFFFFFFFB), "SLURM_PROCID": "0"},
        {"SLURM_STEP_ID": str(0xFFFFFFFA), "SLURM_PROCID": "0"},
        {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
    ],
    ids=["no step", "batch script", "interactive step", "one task", "one task of a larger job"],
)
def test_a_process_that_is_no_task_of_a_parallel_step_is_alone(changed: dict[str, str]) -> None:
    assert detect({**STEP, **changed}).source == "nothing"


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ({"SLURM_NTASKS": "4"}, "SLURM_NTASKS=4, but this is no Slurm step; srun would start 4"),
        ({"SLURM_NNODES": "3"}, "SLURM_NNODES=3, but this is no Slurm step; srun would start 3"),
        ({"SLURM_NNODES": "1", "SLURM_NTASKS": "1"}, None),
        ({**STEP, "SLURM_NTASKS": "1", "SLURM_NNODES": "2", "SLURM_PROCID": "0"}, None),
    ],
    ids=["tasks", "nodes", "one of each", "a step of one task"],
)
def test_a_batch_script_is_told_that_srun_would_start_the_ranks(
    script: dict[str, str], told: str | None
) -> None:
    found = detect({"SLURM_JOB_ID": "100", **script})
    assert (found.world_size, found.source) == (1, "nothing")
    assert told is None if found.advice is None else found.advice.startswith(str(told))
    assert (found.advice or "") in found.reason


def test_a_task_without_its_step_does_not_train_alone() -> None:
    with pytest.raises(ConfigError, match="SLURM_PROCID='1' says that this is one of several"):
        detect({**STEP, "SLURM_STEP_ID": ""})


def test_the_port_of_our_own_replaces_the_one_that_follows_from_the_job() -> None:
    assert detect({**STEP, "GRADRING_PORT": "29500-29515"}).rendezvous == "node1:29500"


def test_a_step_without_a_node_list_is_an_error() -> None:
    with pytest.raises(ConfigError, match="SLURM_STEP_NODELIST is not"):
        detect({**STEP, "SLURM_STEP_NODELIST": ""})


def test_tasks_may_listen_at_the_given_ports_of_all_nodes() -> None:
    assert detect(STEP).candidates == ()
    assert detect({**STEP, "GRADRING_PORT": "29500-29501"}).candidates == (
        "node1:29500",
        "node1:29501",
        "node2:29500",
        "node2:29501",
    )
