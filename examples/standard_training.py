"""The usual shape of a distributed training program: a model, a dataset, compile, fit, evaluate.

gradring run -np 2 -- python examples/standard_training.py
"""

from __future__ import annotations

import hashlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from gradring.tensorflow import CustomCollectiveStrategy

BATCH_PER_WORKER = 32
TRAINING_IMAGES = 1536


def main() -> None:
    """Trains on handwritten digits; every worker prints the same numbers."""
    # The only line to change: tf.distribute.MultiWorkerMirroredStrategy() before.
    strategy = CustomCollectiveStrategy()
    # More workers, larger batches: each worker's share stays the same.
    global_batch = BATCH_PER_WORKER * strategy.num_replicas_in_sync
    training, test = prepare_dataset(global_batch)
    with strategy.scope():
        model = create_model()
        model.compile(
            optimizer=keras.optimizers.Adam(0.005),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    losses = model.fit(training, epochs=3, validation_data=test, verbose=0).history["loss"]
    scores = model.evaluate(test, verbose=0, return_dict=True)
    print(f"loss {losses[0]:.6f} {losses[-1]:.6f} accuracy {scores['accuracy']:.4f}")
    print(f"weights {fingerprint(model)}")


def create_model() -> Any:
    """Logits of ten digits from images of 8 x 8: float32 `[batch, 64]` to `[batch, 10]`."""
    return keras.Sequential(
        [keras.layers.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)]
    )


def prepare_dataset(global_batch: int) -> tuple[Any, Any]:
    """Batches to train with, and batches to test with.

    Every worker builds the same dataset, and so shuffles with the same seed; tf.distribute gives
    each worker its own part of it.
    """
    digits = load_digits()
    images = (digits.data / 16.0).astype(np.float32)
    labels = digits.target.astype(np.int32)
    everything = tf.data.Dataset.from_tensor_slices((images, labels))
    options = tf.data.Options()
    # Not in files, so there is nothing to share out but the elements.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    everything = everything.with_options(options)
    training = everything.take(TRAINING_IMAGES).shuffle(TRAINING_IMAGES, seed=1)
    test = everything.skip(TRAINING_IMAGES)
    return (
        training.batch(global_batch, drop_remainder=True).prefetch(2),
        test.batch(global_batch, drop_remainder=True),
    )


def fingerprint(model: Any) -> str:
    """Equal only if the weights are equal to the last bit."""
    weights = b"".join(weight.tobytes() for weight in model.get_weights())
    return hashlib.sha256(weights).hexdigest()[:12]


if __name__ == "__main__":
    main()
