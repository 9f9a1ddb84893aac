"""Runs the elastic example; then loses workers and a node, and waits for what replaces them.

Run with an interpreter that has Ray. Its arguments: a directory, in which that program is.
"""

import importlib
import os
import signal
import sys
import threading
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

import gradring
from elastic.observed import PROGRAM, Job

WORKERS = 3


def lose_some(cluster: Cluster, job: Job) -> None:
    """What happens to the workers."""
    group = job.group(WORKERS)
    for rank in (1, 0):
        os.kill(group[rank]["pid"], signal.SIGKILL)
        group = job.group(WORKERS)
    nodes = {node.node_id: node for node in cluster.list_all_nodes()}
    del nodes[cluster.head_node.node_id]
    lost = next(each["node"] for each in group if each["node"] in nodes)
    cluster.remove_node(nodes[lost], allow_graceful=False)
    assert lost not in {each["node"] for each in job.group(WORKERS)}
    job.ends(WORKERS)


def main(directory: str) -> None:
    sys.path.insert(0, directory)
    example = importlib.import_module("ray_elastic")

    def observed(comm: gradring.Communicator) -> int:
        program = importlib.import_module(PROGRAM.stem)
        node = ray.get_runtime_context().get_node_id()
        return int(program.take_part(comm, directory, node))

    failed: list[BaseException] = []

    def lose() -> None:
        job = Job(Path(directory), str)
        try:
            lose_some(cluster, job)
        except BaseException as error:
            failed.append(error)
            (Path(directory) / "enough").touch()

    # Ray makes its workers nice, and on a busy machine they would hardly start. It reads this name.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": WORKERS})
    for _ in range(WORKERS - 1):
        cluster.add_node(num_cpus=WORKERS)
    modules = {"PYTHONPATH": os.pathsep.join([directory, str(PROGRAM.parent)])}
    ray.init(address=cluster.address, log_to_driver=False, runtime_env={"env_vars": modules})
    try:
        cluster.wait_for_nodes()
        assert abs(example.run_elastic(example.train, WORKERS) - 1.0) < 1e-3
        losses = threading.Thread(target=lose, daemon=True)
        losses.start()
        example.run_elastic(observed, WORKERS)
        losses.join()
        if failed:
            raise failed[0]
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
