"""Keras' `fit` on several workers.

Each worker finds its place in TF_CONFIG. The launcher sets it:

    gradring run -np 2 -- python examples/fit.py

By hand, in two terminals, with index 0 in the first and 1 in the second:

    export TF_CONFIG='{"cluster": {"worker": ["localhost:29501", "localhost:29502"]},
                       "task": {"type": "worker", "index": 0}}'
    python examples/fit.py
"""

from __future__ import annotations

import hashlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from gradring.tensorflow import CustomCollectiveStrategy

GLOBAL_BATCH = 32


def main() -> None:
    """Fits a line; every worker prints the same losses and weights."""
    # The only line to change: tf.distribute.MultiWorkerMirroredStrategy() before.
    strategy = CustomCollectiveStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
        model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    losses = model.fit(line(), epochs=5, verbose=0).history["loss"]
    print(f"loss {losses[0]:.6f} {losses[-1]:.6f}")
    print(f"weights {fingerprint(model)}")


def line() -> Any:
    """Points of y = 3x + 1, in batches for all workers together: float32 of shape `[batch, 1]`."""
    x = np.linspace(-1.0, 1.0, 256, dtype=np.float32)[:, np.newaxis]
    x = np.random.default_rng(0).permutation(x)
    return tf.data.Dataset.from_tensor_slices((x, 3.0 * x + 1.0)).batch(GLOBAL_BATCH)


def fingerprint(model: Any) -> str:
    """Equal only if the weights are equal to the last bit."""
    weights = b"".join(weight.tobytes() for weight in model.get_weights())
    return hashlib.sha256(weights).hexdigest()[:12]


if __name__ == "__main__":
    main()
