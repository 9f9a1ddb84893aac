"""Workers that train by parameter servers, in one of four ways.

    gradring run -np 3 --ps 1 -- python examples/parameter_server.py synchronous
    gradring run -np 3 --ps 1 -- python examples/parameter_server.py asynchronous
    gradring run -np 3 --ps 1 -- python examples/parameter_server.py queue
    gradring run -np 3 --ps 2 -- python examples/parameter_server.py placement

The servers run this program, too: there, making the strategy serves until the workers have ended,
and then ends the process.
"""

from __future__ import annotations

import argparse
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from gradring import updates
from gradring.tensorflow import CustomCollectiveStrategy

WORDS, LENGTH, GLOBAL_BATCH, EPOCHS = 1000, 8, 48, 4

RULES = {
    # An update is the sum of all workers' gradients, as of an all-reduce.
    "synchronous": updates.ParameterServer(),
    # Each gradient is an update; one of older variables counts less.
    "asynchronous": updates.ParameterServer(staleness=None),
    # An update is the mean of two gradients, whosever they are; old ones make room for new ones.
    "queue": updates.ParameterServer(staleness=None, aggregate=2, overflow="drop_oldest"),
    # The table of words is on the second server, all else on the first.
    "placement": updates.ParameterServer(placement={"table": 1, "output": 0}),
}


def main() -> None:
    """Trains, and prints what this worker sees of it."""
    parser = argparse.ArgumentParser(description="train by parameter servers")
    parser.add_argument("rule", choices=RULES)
    strategy = CustomCollectiveStrategy(update=RULES[parser.parse_args().rule])
    worker = strategy.cluster_resolver.task_id
    with strategy.scope():
        layers = [
            keras.layers.Input((LENGTH,), dtype="int32"),
            keras.layers.Embedding(WORDS, 16, name="table"),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(1, name="output"),
        ]
        model = keras.Sequential(layers)
        optimizer = keras.optimizers.Adam(0.01)
    loss_of = keras.losses.BinaryCrossentropy(from_logits=True, reduction="sum")

    def replica_step(texts: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(texts, training=True)) / GLOBAL_BATCH
        gradients = tape.gradient(loss, model.trainable_variables)
        # Pushes the gradients, and pulls what the servers have then.
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function  # type: ignore[untyped-decorator]
    def train_step(batch: Any) -> Any:
        return strategy.run(replica_step, args=batch)

    # Each worker gets its share of every batch, and computes its share of the loss.
    texts, labels = sentiments(seed=0, count=2880)
    data = tf.data.Dataset.from_tensor_slices((texts, labels)).batch(GLOBAL_BATCH)
    batches = strategy.experimental_distribute_dataset(data)
    for epoch in range(EPOCHS):
        loss = np.mean([train_step(batch) for batch in batches]) * strategy.num_replicas_in_sync
        print(f"worker {worker} epoch {epoch} loss {loss:.3f}", flush=True)
    texts, labels = sentiments(seed=1, count=480)
    accuracy = np.mean((model(texts) > 0) == (labels > 0))
    counted = strategy.update_stats()
    print(
        f"worker {worker} accuracy {accuracy:.3f} version {counted['version']} "
        f"{counted['bytes_sent'] / 1e6:.1f} MB sent"
    )


def sentiments(seed: int, count: int) -> tuple[Any, Any]:
    """Texts of numbered words, of which every third is a good one, and whether most are good."""
    texts = np.random.default_rng(seed).integers(0, WORDS, (count, LENGTH)).astype(np.int32)
    good = np.sum(texts % 3 == 0, axis=1, keepdims=True)
    return texts, (good > LENGTH / 3).astype(np.float32)


if __name__ == "__main__":
    main()
