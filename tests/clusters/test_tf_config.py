"""``TF_CONFIG`` in all the shapes that launchers write, and in those that are wrong."""

import json
from typing import Any

import pytest

from gradring.clusters import Cluster, Servers, detect, servers_in
from gradring.errors import ConfigError


def found(cluster: Any, task: Any) -> Cluster:
    return detect({"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})})


def test_the_chief_comes_first_then_the_workers() -> None:
    cluster = {"worker": ["b:1", "c:1"], "chief": ["a:1"]}
    chief = found(cluster, {"type": "chief", "index": 0})
    last = found(cluster, {"type": "worker", "index": 1})
    assert (chief.rank, chief.world_size, chief.rendezvous, chief.listen) == (0, 3, "a:1", "a:1")
    assert (last.rank, last.world_size, last.rendezvous, last.listen) == (2, 3, "a:1", "c:1")


def test_parameter_servers_and_evaluators_of_the_cluster_are_not_counted() -> None:
    cluster = {"worker": ["b:1", "c:1"], "ps": ["p:1"], "evaluator": ["e:1"]}
    assert found(cluster, {"type": "worker", "index": 1}).world_size == 2


def test_objects_and_string_indices_are_accepted() -> None:
    cluster = {"chief": {"0": "a:1"}, "worker": {"1": "c:1", "0": "b:1"}}
    worker = found(cluster, {"type": "worker", "index": "1"})
    assert (worker.rank, worker.world_size, worker.listen) == (2, 3, "c:1")


@pytest.mark.parametrize(
    ("workers", "missing", "last"), [({"1": "b:1"}, 0, 1), ({"0": "a:1", "3": "d:1"}, 1, 3)]
)
@pytest.mark.parametrize("others", [{}, {"chief": ["c:1"]}])
def test_a_job_with_gaps_tells_no_rank(
    workers: dict[str, str], missing: int, last: int, others: dict[str, Any]
) -> None:
    named = rf"cluster.worker\[{missing}\] is missing, but there is an index {last}"
    with pytest.raises(ConfigError, match=named):
        found({"worker": workers, **others}, {"type": "worker", "index": last})


@pytest.mark.parametrize("others", [{}, {"evaluator": ["e:1"]}])
@pytest.mark.parametrize("moved", [{}, {"GRADRING_RENDEZVOUS": "a:2"}])
def test_an_evaluator_is_a_world_of_one(others: dict[str, Any], moved: dict[str, str]) -> None:
    task = {"type": "evaluator", "index": 0}
    config = {"cluster": {"chief": ["a:1"], "worker": ["b:1"], **others}, "task": task}
    alone = detect({"TF_CONFIG": json.dumps(config), **moved})
    assert (alone.rank, alone.world_size, alone.rendezvous, alone.listen, alone.source) == (
        *(0, 1, "127.0.0.1:0", None),
        "TF_CONFIG",
    )
    assert "evaluator 0: a world of one" in alone.reason


def test_a_parameter_server_is_in_no_group_and_is_told_when_it_serves() -> None:
    with pytest.raises(ConfigError, match=r"ps 0, and a parameter server is in no group: it serve"):
        found({"worker": ["a:1"], "ps": ["b:1"]}, {"type": "ps", "index": 0})


def test_all_tasks_know_the_parameter_servers_and_these_themselves() -> None:
    def servers(cluster: object, job: str, index: int) -> Servers:
        config = {"cluster": cluster, "task": {"type": job, "index": index}}
        return servers_in({"TF_CONFIG": json.dumps(config)})

    both = {"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1", "d:1"]}
    for job in ("chief", "worker", "evaluator"):
        assert servers(both, job, 0) == Servers(("c:1", "d:1"), None, 2)
    assert servers(both, "ps", 1) == Servers(("c:1", "d:1"), 1, 2)
    assert servers({"worker": ["b:1"]}, "worker", 0) == Servers((), None, 1)
    assert servers_in({}) == Servers((), None, 0)
    with pytest.raises(ConfigError, match=r"ps 2, which is not in the cluster \(ps 0, ps 1\)"):
        servers(both, "ps", 2)
    with pytest.raises(ConfigError, match=r"cluster\.ps\[0\]='c' is not host"):
        servers({"worker": ["b:1"], "ps": ["c"]}, "worker", 0)


WORKER = {"type": "worker", "index": 0}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ("{", "it is not JSON"),
        ("[]", "it is not an object"),
        ("", "it is empty"),
        (" \n", "it is empty"),
        (
            '{"cluster": {"worker": ["a:1", "b:1"], "worker": ["a:1"]}, '
            '"task": {"type": "worker", "index": 0}}',
            "the key 'worker' occurs twice",
        ),
        ({}, "cluster is missing; without it this process would train alone"),
        ({"task": WORKER}, "cluster is missing"),
        ({"cluster": {}, "task": WORKER}, "cluster is not an object with at least one entry"),
        ({"cluster": {"ps": ["a:1"]}, "task": WORKER}, "neither a chief nor a worker"),
        ({"cluster": {"master": ["a:1"]}, "task": WORKER}, "cluster.master is not a known job"),
        ({"cluster": {"worker": "a:1"}, "task": WORKER}, "cluster.worker is neither a list"),
        ({"cluster": {"worker": ["a"]}, "task": WORKER}, r"cluster.worker\[0\]='a' is not host"),
        ({"cluster": {"worker": [1]}, "task": WORKER}, r"cluster.worker\[0\]=1 is not host"),
        (
            {"cluster": {"worker": ["a:1", "a:1"]}, "task": WORKER},
            r"cluster.worker\[1\] has the address of cluster.worker\[0\]",
        ),
        ({"cluster": {"worker": {"x": "a:1"}}, "task": WORKER}, "cluster.worker has the index 'x'"),
        ({"cluster": {"chief": ["a:1", "b:1"]}, "task": WORKER}, "cluster.chief has more than one"),
        ({"cluster": {"worker": ["a:1"]}}, "task is missing"),
        ({"cluster": {"worker": ["a:1"]}, "task": {"index": 0}}, "task.type is None"),
        ({"cluster": {"worker": ["a:1"]}, "task": {"type": "worker"}}, "task.index is missing"),
        ({"cluster": {"worker": ["a:1"]}, "task": {"type": "evaluator"}}, "task.index is missing"),
        (
            {"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": True}},
            "task.index has the index True",
        ),
        (
            {"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 1}},
            r"task is worker 1, which is not in the cluster \(worker 0\)",
        ),
    ],
)
def test_a_malformed_tf_config_is_an_error_that_names_the_field(config: Any, named: str) -> None:
    text = config if isinstance(config, str) else json.dumps(config)
    with pytest.raises(ConfigError, match=named):
        detect({"TF_CONFIG": text})
