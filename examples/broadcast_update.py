"""One worker computes an update and every replica receives it, in one call.

`broadcast_update` is gradring's own, so this program has no counterpart among TensorFlow's
strategies; primary_update.py does the same with tf.distribute's calls.

    gradring run -np 2 -- python examples/broadcast_update.py
"""

from __future__ import annotations

import hashlib
from typing import Any

import keras
import tensorflow as tf

from gradring.tensorflow import CustomCollectiveStrategy

STEPS = 4
KEEP = 0.9


def main() -> None:
    """The chief averages weights over time and draws noise; every worker has the same."""
    strategy = CustomCollectiveStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
        averages = [tf.Variable(tf.zeros(weight.shape)) for weight in model.weights]
    # Each rank's own, and never compared: only what the chief draws is used.
    noise = tf.random.Generator.from_non_deterministic_state()

    def average_and_draw(weights: Any) -> Any:
        for average, weight in zip(averages, weights, strict=True):
            average.assign(KEEP * average + (1.0 - KEEP) * weight)
        return [noise.normal(weight.shape, stddev=0.01) for weight in weights]

    @tf.function  # type: ignore[untyped-decorator]
    def step() -> None:
        weights = [tf.convert_to_tensor(weight) for weight in model.weights]
        # Runs on the chief. Its result and the variables it assigns reach every rank.
        disturbances = strategy.broadcast_update(average_and_draw, weights)
        for weight, disturbance in zip(model.weights, disturbances, strict=True):
            weight.assign_add(disturbance)

    for _ in range(STEPS):
        step()
    print(f"averages {fingerprint(averages)}")
    print(f"weights {fingerprint(model.weights)}")


def fingerprint(variables: Any) -> str:
    """Equal only if the variables are equal to the last bit."""
    contents = b"".join(tf.convert_to_tensor(v).numpy().tobytes() for v in variables)
    return hashlib.sha256(contents).hexdigest()[:12]


if __name__ == "__main__":
    main()
