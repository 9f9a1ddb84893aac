"""A training loop of one's own on several workers.

    gradring run -np 2 -- python examples/custom_loop.py

Started by hand, it needs TF_CONFIG; see fit.py.
"""

from __future__ import annotations

import hashlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from gradring.tensorflow import CustomCollectiveStrategy

GLOBAL_BATCH = 32
EPOCHS = 3


def main() -> None:
    """Trains a classifier; every worker prints the same losses, accuracy and weights."""
    # The only line to change: tf.distribute.MultiWorkerMirroredStrategy() before.
    strategy = CustomCollectiveStrategy()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [keras.layers.Input((2,)), keras.layers.Dense(16, "tanh"), keras.layers.Dense(1)]
        )
        optimizer = keras.optimizers.Adam(0.05)
        # Adds up over the workers whenever it is read.
        correct = tf.Variable(
            0.0,
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )
    # Each worker gets its share of every batch.
    batches = strategy.experimental_distribute_dataset(ring_or_disc())

    def replica_step(points: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = model(points, training=True)
            losses = tf.nn.sigmoid_cross_entropy_with_logits(labels, logits)
            # A sum over this worker's share, divided by the size of the whole batch: what the
            # workers then add up is the mean.
            loss = tf.reduce_sum(losses) / GLOBAL_BATCH
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        right = tf.equal(logits > 0.0, labels > 0.5)
        correct.assign_add(tf.reduce_sum(tf.cast(right, tf.float32)))
        return loss

    @tf.function  # type: ignore[untyped-decorator]
    def train_step(batch: Any) -> Any:
        per_replica = strategy.run(replica_step, args=batch)
        return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica, axis=None)

    for epoch in range(EPOCHS):
        correct.assign(0.0)
        losses = [float(train_step(batch)) for batch in batches]
        seen = GLOBAL_BATCH * len(losses)
        accuracy = float(correct.read_value()) / seen
        print(f"epoch {epoch} loss {np.mean(losses):.6f} accuracy {accuracy:.4f}")
    print(f"weights {fingerprint(model)}")


def ring_or_disc() -> Any:
    """Points of the plane, and whether each is far from the middle.

    Batches of float32 of shapes `[batch, 2]` and `[batch, 1]`, for all workers together.
    """
    points = np.random.default_rng(0).normal(size=(512, 2)).astype(np.float32)
    labels = (np.linalg.norm(points, axis=1, keepdims=True) > 1.2).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((points, labels)).batch(GLOBAL_BATCH)


def fingerprint(model: Any) -> str:
    """Equal only if the weights are equal to the last bit."""
    weights = b"".join(weight.tobytes() for weight in model.get_weights())
    return hashlib.sha256(weights).hexdigest()[:12]


if __name__ == "__main__":
    main()
