"""A program for Ray's TensorflowTrainer, with gradring's in its place.

Prints one JSON object with what a worker found. Run with an interpreter that has Ray.
"""

import inspect
import json
import os
import sys

import ray
import ray.train
from ray.train.tensorflow import TensorflowConfig
from ray.train.tensorflow import TensorflowTrainer as RaysTrainer

from gradring.ray import GradringConfig, TensorflowTrainer


def train(config: dict[str, int]) -> dict[str, object]:
    """As in a program that knows nothing of gradring, but for the last expression."""
    import tensorflow as tf

    cluster = json.loads(os.environ["TF_CONFIG"])["cluster"]
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(tf.ones((8, 2)), tf.ones((8, 1)), batch_size=4, verbose=0)
    return {
        "workers": len(cluster["worker"]),
        "config": config,
        "ranks": strategy.communicator.world_size,
        "own variable": os.environ["OWN_VARIABLE"],
    }


def main(directory: str) -> None:
    # Ray makes its workers nice, and on a busy machine they would hardly start. It reads this name.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
    ray.init(num_cpus=2, log_to_driver=False)
    variables = {"env_vars": {"OWN_VARIABLE": "kept"}}
    run_config = ray.train.RunConfig(storage_path=directory, worker_runtime_env=variables)
    given = dict.fromkeys(list(inspect.signature(RaysTrainer).parameters)[1:])
    given["train_loop_config"] = {"value": 3}
    given["scaling_config"] = ray.train.ScalingConfig(num_workers=2)
    given["run_config"] = run_config
    with_settings = TensorflowTrainer(train, tensorflow_config=GradringConfig(timeout_s=60.0))
    trainer = TensorflowTrainer(train, **{**given, "tensorflow_config": TensorflowConfig()})
    found = {
        "of a worker": trainer.fit().return_value,
        "run_config": run_config.worker_runtime_env,
        "timeout_s": with_settings.backend_config.timeout_s,
    }
    print(json.dumps(found))
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
