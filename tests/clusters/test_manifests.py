"""The manifests of examples/kubernetes: ranks with what their pods would get form a group.

Those of an elastic job come back under their index: in the same pod, or in one elsewhere.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pods
import pytest
from pods import Pod
from pods_on_hosts import PodsOnHosts

from gradring.config.values import Settings
from gradring.errors import ConfigError
from gradring.testing import simulated_hosts
from support.documents import ROOT, programs

EXAMPLES = ROOT / "examples" / "kubernetes"
DOMAIN = "default.svc.cluster.local"
SERVICES = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_PORT": "tcp://10.96.0.1:443"}

needs_namespaces = pytest.mark.skipif(pods.why_not() is not None, reason=str(pods.why_not()))


def indexed_job(directory: Path, manifest: str = "indexed-job.yaml") -> list[Pod]:
    """As the Job controller makes them: the index is a variable, and the end of the hostname."""
    found = pods.documents(EXAMPLES / manifest)
    job, service = found["Job"], found["Service"]
    name, template = job["metadata"]["name"], job["spec"]["template"]["spec"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert template["subdomain"] == service["metadata"]["name"]
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["completions"] == job["spec"]["parallelism"]
    made = []
    for index in range(job["spec"]["completions"]):
        host = f"{name}-{index}"
        full = f"{host}.{template['subdomain']}.{DOMAIN}"
        environ = container(template, directory / host, {})
        made.append(Pod(host, [full, host], {**environ, "JOB_COMPLETION_INDEX": str(index)}))
    return made


def tf_job(directory: Path) -> list[Pod]:
    """As the training operator makes them: a service for each pod, and ``TF_CONFIG``."""
    job = pods.documents(EXAMPLES / "tfjob.yaml")["TFJob"]
    name, worker = job["metadata"]["name"], job["spec"]["tfReplicaSpecs"]["Worker"]
    template = worker["template"]["spec"]
    assert template["containers"][0]["name"] == "tensorflow"
    hosts = [f"{name}-worker-{index}" for index in range(worker["replicas"])]
    cluster = {"worker": [f"{host}.default.svc:2222" for host in hosts]}
    made = []
    for index, host in enumerate(hosts):
        task = {"cluster": cluster, "task": {"type": "worker", "index": index}}
        environ = container(template, directory / host, {})
        config = json.dumps({**task, "environment": "cloud"})
        made.append(Pod(host, [f"{host}.default.svc", host], {**environ, "TF_CONFIG": config}))
    return made


def train_job(directory: Path) -> list[Pod]:
    """A TrainJob with the JAX runtime of Kubeflow Trainer."""
    job = pods.documents(EXAMPLES / "trainjob.yaml")["TrainJob"]
    assert job["spec"]["runtimeRef"]["name"] == "jax-distributed"
    environ = pods.container_environ(job["spec"]["trainer"], {}, {})
    return trainer_pods(job, lambda host: environ)


def train_job_of_tensorflow(directory: Path) -> list[Pod]:
    """A TrainJob with our runtime, which has the policy of the JAX runtime."""
    found = pods.documents(EXAMPLES / "tensorflow-runtime.yaml")
    runtime, job = found["ClusterTrainingRuntime"], found["TrainJob"]
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert runtime["spec"]["mlPolicy"] == {"numNodes": 1, "jax": {}}
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    # By these Trainer finds the container whose variables, image and command it sets.
    assert replicated["name"] == "node"
    labels = replicated["template"]["metadata"]["labels"]
    assert labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    template = replicated["template"]["spec"]["template"]["spec"]
    assert [each["name"] for each in template["containers"]] == ["node"]
    return trainer_pods(job, lambda host: container(template, directory / host, {}))


def trainer_pods(job: Mapping[str, Any], environ_of: Callable[[str], dict[str, str]]) -> list[Pod]:
    """As Trainer's policy for JAX makes them: a JobSet with one Indexed Job, ``node``."""
    name, nodes = job["metadata"]["name"], job["spec"]["trainer"]["numNodes"]
    made = []
    for index in range(nodes):
        host = f"{name}-node-0-{index}"
        environ = {
            **environ_of(host),
            "JAX_NUM_PROCESSES": str(nodes),
            "JAX_PROCESS_ID": str(index),
            "JAX_COORDINATOR_ADDRESS": f"{name}-node-0-0.{name}:29500",
            "JOB_COMPLETION_INDEX": str(index),
        }
        made.append(Pod(host, [f"{host}.{name}.{DOMAIN}", f"{host}.{name}", host], environ))
    return made


def container(
    template: Mapping[str, Any], directory: Path, fields: Mapping[str, str]
) -> dict[str, str]:
    """The variables of the only container, once its user can read what its volumes hold."""
    (only,) = template["containers"]
    context = template.get("securityContext", {})
    volumes = {volume["name"]: volume["secret"] for volume in template["volumes"]}
    mounts = {}
    for mount in only["volumeMounts"]:
        here = mounts[mount["mountPath"]] = directory / mount["name"]
        pods.mount_secret(volumes[mount["name"]], here, context.get("fsGroup"))
        for key in pods.SECRETS[volumes[mount["name"]]["secretName"]]:
            assert pods.is_readable(here / key, context)
    return pods.container_environ(only, fields, mounts)


@needs_namespaces
@pytest.mark.parametrize("kind", [indexed_job, tf_job, train_job, train_job_of_tensorflow])
def test_the_ranks_of_a_manifest_form_a_group(kind: Any, tmp_path: Path) -> None:
    program = tmp_path / "sum.py"
    program.write_text(programs()["sum.py"])
    made = kind(tmp_path)
    assert len(made) == 2
    done = pods.run(
        [Pod(p.hostname, p.names, SERVICES | p.environ) for p in made], program, tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 2 0.5", "1 2 0.5"]
    assert "without a token" not in done.stderr


@pytest.fixture
def elastic_pods(tmp_path: Path) -> Iterator[PodsOnHosts]:
    """Three pods that run an elastic job, and an address to spare."""
    made = indexed_job(tmp_path, "elastic-job.yaml")
    with simulated_hosts(4) as hosts, PodsOnHosts(made, hosts, tmp_path) as started:
        started.job.group(3)
        yield started


def test_a_pod_that_fails_comes_back_at_its_address(elastic_pods: PodsOnHosts) -> None:
    for index in (1, 0):
        elastic_pods.end(index, signal.SIGKILL)
        elastic_pods.start(index)
        elastic_pods.job.group(3)
    elastic_pods.job.ends(3)


def test_a_pod_that_is_evicted_comes_back_at_another_address(elastic_pods: PodsOnHosts) -> None:
    elastic_pods.end(0, signal.SIGTERM)
    elastic_pods.start(0, elsewhere=True)
    group = elastic_pods.job.group(3)
    assert min(each["step"] for each in group) > 0
    elastic_pods.job.ends(3)


@pytest.mark.slow
def test_a_pod_whose_node_is_lost_comes_back_at_another_address(elastic_pods: PodsOnHosts) -> None:
    elastic_pods.lose(0)
    elastic_pods.start(0, elsewhere=True)
    elastic_pods.job.group(3)
    elastic_pods.job.ends(3)


def test_a_secret_with_the_default_mode_is_refused_with_the_line_to_add(tmp_path: Path) -> None:
    pods.mount_secret({"secretName": "gradring"}, tmp_path / "secret", None)
    token = str(tmp_path / "secret" / "token")
    with pytest.raises(ConfigError, match=r"mode 644\); .* defaultMode: 0400"):
        Settings.from_environ({"GRADRING_TOKEN_FILE": token})


@pytest.mark.parametrize("manifest", ["indexed-job.yaml", "elastic-job.yaml"])
def test_the_policy_admits_the_port_that_the_ranks_use(manifest: str) -> None:
    found = pods.documents(EXAMPLES / manifest)
    policy, job = found["NetworkPolicy"]["spec"], found["Job"]["spec"]["template"]["spec"]
    (environ,) = (c["env"] for c in job["containers"])
    (port,) = (int(v["value"]) for v in environ if v["name"] == "GRADRING_PORT")
    assert [p["port"] for p in policy["ingress"][0]["ports"]] == [port]
    assert policy["podSelector"] == policy["ingress"][0]["from"][0]["podSelector"]
