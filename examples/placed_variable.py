"""A variable that is placed on a parameter server, and used on the workers.

    gradring run -np 2 --ps 1 -- python examples/placed_variable.py

The server runs this program, too: there, making the strategy serves until the workers have ended,
and then ends the process.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from gradring import updates
from gradring.tensorflow import CustomCollectiveStrategy

PIXELS, CLASSES, BATCH, STEPS = 784, 10, 64, 100


def main() -> None:
    """Trains, and prints what this worker sees of it."""
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    # The only line to change: tf.distribute.ParameterServerStrategy(resolver) before.
    strategy = CustomCollectiveStrategy(resolver, update=updates.ParameterServer())
    worker, workers = resolver.task_id, strategy.num_replicas_in_sync

    with strategy.scope():
        with tf.device("/job:ps/task:0"):
            weights = tf.Variable(tf.zeros([PIXELS, CLASSES]), name="weights")
        optimizer = keras.optimizers.SGD(0.5)

    def loss_of(images: Any, labels: Any) -> Any:
        logits = images @ weights
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))

    @tf.function  # type: ignore[untyped-decorator]
    def step(images: Any, labels: Any) -> None:
        def replica_step() -> None:
            with tf.GradientTape() as tape:
                loss = loss_of(images, labels) / workers
            # Pushes the gradient to the server, and pulls what it has then.
            optimizer.apply_gradients([(tape.gradient(loss, weights), weights)])

        strategy.run(replica_step)

    tested = samples(np.random.default_rng(workers), count=1000)
    print(f"loss {loss_of(*tested):.4f}")
    own = np.random.default_rng(worker)
    for _ in range(STEPS):
        step(*samples(own, BATCH))
    print(f"loss {loss_of(*tested):.4f}")


def samples(rng: np.random.Generator, count: int) -> tuple[Any, Any]:
    """Random images, each of the class of the brightest of its first pixels."""
    images = rng.normal(size=(count, PIXELS)).astype(np.float32)
    return tf.constant(images), tf.constant(images[:, :CLASSES].argmax(axis=1))


if __name__ == "__main__":
    main()
