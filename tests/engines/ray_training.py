"""Trains a Keras 3 model on a Ray cluster of three nodes, of which one is lost on the way.

Prints one JSON object with what happened. Run with an interpreter that has Ray.
"""

import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import ray
from ray import train as ray_train
from ray.cluster_utils import Cluster

from gradring.ray import GradringTrainer

EPOCHS = 6
WORKERS = 3
CPUS_PER_NODE = 2


def train(config: dict[str, str]) -> None:
    """What every worker runs."""
    import keras
    import numpy as np

    from gradring.tensorflow import CustomCollectiveStrategy

    notes = Path(config["notes"])
    strategy = CustomCollectiveStrategy()
    context = ray_train.get_context()
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05), "mse")
    first = 0
    checkpoint = ray_train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as directory:
            saved = np.load(os.path.join(directory, "weights.npz"))
            first = int(saved["epoch"]) + 1
            model.set_weights([saved["kernel"], saved["bias"]])
    started = {
        "first": first,
        "rank": int(os.environ["GRADRING_RANK"]),
        "world_size": strategy.num_replicas_in_sync,
        "world_rank": context.get_world_rank(),
        "node": ray.get_runtime_context().get_node_id(),
        "keras": keras.__version__,
    }
    (notes / f"started-{time.time_ns()}-{os.getpid()}").write_text(json.dumps(started))
    x = np.random.default_rng(0).normal(size=(96, 4)).astype("float32")
    y = x @ np.array([[1.0], [-2.0], [3.0], [0.5]], np.float32)
    for epoch in range(first, EPOCHS):
        history = model.fit(x, y, batch_size=24, shuffle=False, verbose=0)
        kernel, bias = model.get_weights()
        if epoch == 2 and first == 0:
            pause_if_chosen(notes, started["rank"])
        with tempfile.TemporaryDirectory() as directory:
            path = os.path.join(directory, "weights.npz")
            np.savez(path, kernel=kernel, bias=bias, epoch=epoch)
            of_chief = (
                ray_train.Checkpoint.from_directory(directory) if not started["rank"] else None
            )
            loss = float(history.history["loss"][0])
            metrics = {"epoch": epoch, "loss": loss, "weight": float(kernel.sum())}
            ray_train.report(metrics, checkpoint=of_chief)
    (notes / f"ended-{started['rank']}").write_text(repr(kernel.tolist()))


def pause_if_chosen(notes: Path, rank: int) -> None:
    """Waits for the driver to choose a rank; that rank waits until its node is lost."""
    chosen = notes / "chosen"
    while not chosen.exists():
        time.sleep(0.1)
    if rank == int(chosen.read_text()):
        (notes / "paused").touch()
        time.sleep(300)


def lose_a_node(cluster: Cluster, notes: Path) -> None:
    """Removes the node of a rank that is not on the driver's own."""
    while len(list(notes.glob("started-*"))) < WORKERS:
        time.sleep(0.1)
    nodes = {node.node_id: node for node in cluster.list_all_nodes()}
    started = [json.loads(path.read_text()) for path in notes.glob("started-*")]
    rank, lost = max(
        (start["rank"], start["node"])
        for start in started
        if start["node"] != cluster.head_node.node_id
    )
    unfinished = notes / "unfinished"
    unfinished.write_text(str(rank))
    unfinished.rename(notes / "chosen")
    while not (notes / "paused").exists():
        time.sleep(0.1)
    cluster.remove_node(nodes[lost], allow_graceful=False)


def main(directory: str) -> None:
    notes = Path(directory) / "notes"
    notes.mkdir()
    # Ray makes its workers nice, and on a busy machine they would hardly start. It reads this name.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": CPUS_PER_NODE})
    for _ in range(WORKERS - 1):
        cluster.add_node(num_cpus=CPUS_PER_NODE)
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        cluster.wait_for_nodes()
        threading.Thread(target=lose_a_node, args=(cluster, notes), daemon=True).start()
        result = GradringTrainer(
            train,
            train_loop_config={"notes": str(notes)},
            scaling_config=ray_train.ScalingConfig(
                num_workers=WORKERS, placement_strategy="SPREAD"
            ),
            run_config=ray_train.RunConfig(
                storage_path=directory, failure_config=ray_train.FailureConfig(max_failures=2)
            ),
        ).fit()
        started = sorted(notes.glob("started-*"))
        print(
            json.dumps(
                {
                    "metrics": result.metrics,
                    "started": [json.loads(path.read_text()) for path in started],
                    "weights": [path.read_text() for path in sorted(notes.glob("ended-*"))],
                    "nodes_left": sum(node["Alive"] for node in ray.nodes()),
                }
            )
        )
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
