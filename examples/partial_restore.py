"""Replaces one layer of a model by an older one, from a checkpoint that only the chief reads.

Only calls of tf.distribute and tf.train. With gradring, `save` writes the checkpoint and
`broadcast_variables` takes the place of `broadcast`.

    gradring run -np 2 -- python examples/partial_restore.py
"""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from gradring.tensorflow import CustomCollectiveStrategy


def main() -> None:
    """Saves a layer, trains, and takes that layer back; the other one keeps its training."""
    # The only line to change: tf.distribute.MultiWorkerMirroredStrategy() before.
    strategy = CustomCollectiveStrategy()
    is_chief = strategy.cluster_resolver.task_id == 0
    with strategy.scope():
        body = keras.layers.Dense(8, "tanh")
        head = keras.layers.Dense(1)
        model = keras.Sequential([keras.layers.Input((4,)), body, head])
        optimizer = keras.optimizers.SGD(0.1)
    print(f"start body {fingerprint(body)} head {fingerprint(head)}")

    with tempfile.TemporaryDirectory() as directory:  # the chief's: nobody else needs it
        prefix = str(Path(directory, "body"))
        if is_chief:
            tf.train.Checkpoint(layer=body).write(prefix)
        train(strategy, model, optimizer)
        print(f"trained body {fingerprint(body)} head {fingerprint(head)}")
        if is_chief:
            tf.train.Checkpoint(layer=body).read(prefix).assert_consumed()
        broadcast(strategy, body.variables, is_chief)
    print(f"restored body {fingerprint(body)} head {fingerprint(head)}")


def train(strategy: Any, model: Any, optimizer: Any) -> None:
    """A few steps of a custom training loop."""
    x = np.random.default_rng(0).normal(size=(128, 4)).astype(np.float32)
    dataset = tf.data.Dataset.from_tensor_slices((x, x[:, :1] * x[:, 1:2])).batch(32)

    def replica_step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((model(x, training=True) - y) ** 2) / 32
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    step = tf.function(lambda batch: strategy.run(replica_step, args=batch))
    for batch in strategy.experimental_distribute_dataset(dataset):
        step(batch)


def broadcast(strategy: Any, variables: Any, is_chief: bool) -> None:
    """Gives every worker the chief's values: everybody else adds zeros."""
    for variable in variables:
        mine = tf.convert_to_tensor(variable)
        contribution = mine if is_chief else tf.zeros_like(mine)

        def add_up(contribution: Any = contribution) -> Any:
            context = tf.distribute.get_replica_context()
            return context.all_reduce(tf.distribute.ReduceOp.SUM, contribution)

        total = strategy.experimental_local_results(strategy.run(tf.function(add_up)))[0]
        variable.assign(total)


def fingerprint(layer: Any) -> str:
    """Equal only if the layer's weights are equal to the last bit."""
    weights = b"".join(weight.tobytes() for weight in layer.get_weights())
    return hashlib.sha256(weights).hexdigest()[:12]


if __name__ == "__main__":
    main()
