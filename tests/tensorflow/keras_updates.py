"""Updates by Keras' own optimizers, to compare the server's optimizers with.

``python tests/tensorflow/keras_updates.py`` writes ``rust/proto/tests/data/keras_updates.json``,
which ``rust/proto/tests/keras_updates.rs`` reads; ``test_keras_updates.py`` says whether it is
still true.

It runs eagerly, because TensorFlow rewrites graphs: under Adagrad the last bit or two of a weight
differ there, probably since a division by a root becomes a multiplication by its reciprocal.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

FILE = Path(__file__).parents[2] / "rust/proto/tests/data/keras_updates.json"
ELEMENTS = 16
STEPS = 120
#: After which the weights are compared, besides the last.
SHOWN = (1, 2, 3, 10, 50)

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {},
    "SGD momentum": {"momentum": 0.9},
    "SGD Nesterov": {"momentum": 0.9, "nesterov": True},
    "SGD weight decay": {"weight_decay": 0.004},
    "Adagrad": {"initial_accumulator_value": 0.1, "epsilon": 1e-7},
    "Adam": {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7},
    "Adam other": {"beta_1": 0.8, "beta_2": 0.99, "epsilon": 1e-3},
    "Adam amsgrad": {"beta_1": 0.9, "beta_2": 0.9, "epsilon": 1e-7, "amsgrad": True},
    "AdamW": {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7, "weight_decay": 0.004},
}


def gradient(step: int) -> Any:
    """Of a step, of all sizes and signs; the same arithmetic as in the test of the core."""
    mixed = [(step * 7919 + element * 104729) % 2003 - 1001 for element in range(ELEMENTS)]
    scale = [10.0 ** -(element % 4) for element in range(ELEMENTS)]
    return np.array(mixed, np.float32) / np.float32(997) * np.array(scale, np.float32)


def learning_rate(step: int) -> float:
    """A schedule."""
    return float(np.float32(0.1) / np.float32(1 + step % 5))


def bits(values: Any) -> list[int]:
    return [int(value) for value in np.asarray(values, np.float32).view(np.uint32)]


def updates(name: str) -> dict[str, Any]:
    """What Keras makes of an optimizer's gradients."""
    options = OPTIMIZERS[name]
    optimizer = getattr(keras.optimizers, name.split()[0])(learning_rate=0.1, **options)
    variable = keras.Variable(np.linspace(-1, 1, ELEMENTS, dtype=np.float32))
    optimizer.build([variable])

    shown = {}
    for step in range(1, STEPS + 1):
        optimizer.learning_rate = learning_rate(step)
        optimizer.apply([tf.constant(gradient(step))])
        if step in (*SHOWN, STEPS):
            shown[step] = bits(variable.numpy())
    return {"options": options, "weights": shown}


def all_updates() -> dict[str, Any]:
    return {"keras": keras.__version__, **{name: updates(name) for name in OPTIMIZERS}}


if __name__ == "__main__":
    FILE.write_text(json.dumps(all_updates(), indent=1) + "\n")
