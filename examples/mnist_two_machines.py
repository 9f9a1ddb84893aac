"""`fit` on two machines, with data in the shape of MNIST.

On each machine, with the addresses of both, and with index 0 on the first and 1 on the second:

    export TF_CONFIG='{"cluster": {"worker": ["10.0.0.1:29500", "10.0.0.2:29500"]},
                       "task": {"type": "worker", "index": 0}}'
    export GRADRING_TOKEN=...   # the same secret on both
    python examples/mnist_two_machines.py

Or both workers on one machine:

    gradring run -np 2 -- python examples/mnist_two_machines.py
"""

from __future__ import annotations

import hashlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from gradring.tensorflow import CustomCollectiveStrategy

BATCH_PER_WORKER = 64
STEPS_PER_EPOCH = 10
EPOCHS = 3


def main() -> None:
    """Trains a small convolutional network; every worker prints the same losses and weights."""
    # The only line to change: tf.distribute.MultiWorkerMirroredStrategy() before.
    strategy = CustomCollectiveStrategy()
    batches = digits_like_mnist(BATCH_PER_WORKER * strategy.num_replicas_in_sync)
    with strategy.scope():
        model = small_network()
        model.compile(
            optimizer=keras.optimizers.Adam(0.003),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    history = model.fit(batches, epochs=EPOCHS, steps_per_epoch=STEPS_PER_EPOCH, verbose=0).history
    print(f"loss {history['loss'][0]:.6f} {history['loss'][-1]:.6f}")
    print(f"weights {fingerprint(model)}")


def digits_like_mnist(global_batch: int) -> Any:
    """Digits enlarged from 8 x 8 to MNIST's size, without end; nothing is downloaded.

    Batches of float32 `[batch, 28, 28, 1]` in [0, 1], and int32 `[batch]`.
    """
    digits = load_digits()
    images = np.repeat(np.repeat(digits.images / 16.0, 3, axis=1), 3, axis=2)
    images = np.pad(images, ((0, 0), (2, 2), (2, 2)))[..., np.newaxis].astype(np.float32)
    labels = digits.target.astype(np.int32)
    dataset = tf.data.Dataset.from_tensor_slices((images, labels))
    return dataset.shuffle(len(labels), seed=1).repeat().batch(global_batch)


def small_network() -> Any:
    """Logits of ten digits from MNIST's images."""
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((28, 28, 1)),
            layers.Conv2D(8, 3, strides=2, activation="relu"),
            layers.Flatten(),
            layers.Dense(32, activation="relu"),
            layers.Dense(10),
        ]
    )


def fingerprint(model: Any) -> str:
    """Equal only if the weights are equal to the last bit."""
    weights = b"".join(weight.tobytes() for weight in model.get_weights())
    return hashlib.sha256(weights).hexdigest()[:12]


if __name__ == "__main__":
    main()
