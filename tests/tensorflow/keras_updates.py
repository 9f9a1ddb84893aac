"""Updates by Keras' own optimizers, to compare the server's optimizers with.

``python tests/tensorflow/keras_updates.py`` writes ``rust/proto/tests/data/keras_updates.json``,
which ``rust/proto/tests/keras_updates.rs`` reads; ``test_keras_updates.py`` says whether it is
still true.

Optimizers run eagerly, because TensorFlow rewrites graphs. A division by a root becomes a
multiplication by its reciprocal there, so the last bits of a weight differ under Adagrad, RMSprop
and Adadelta.

Ftrl runs in a graph, where a power of 0.5 becomes a root, as in the core. Its variables have one
element each, because TensorFlow computes powers of eight elements at a time with other last bits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from gradring.tensorflow.rules.served_optimizer import describe

FILE = Path(__file__).parents[2] / "rust/proto/tests/data/keras_updates.json"
ELEMENTS = 16
#: Steps after which weights are compared, by dtype.
SHOWN = {
    "float32": (1, 2, 3, 10, 50, 120),
    "float64": (1, 2, 10),
    "bfloat16": (1, 2, 10),
    "float16": (1, 2, 10),
}

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
    "RMSprop": {},
    "RMSprop momentum": {"rho": 0.8, "momentum": 0.9, "epsilon": 1e-3},
    "RMSprop centered": {"momentum": 0.5, "centered": True, "weight_decay": 0.004},
    "RMSprop centered without momentum": {"epsilon": 1e-3, "centered": True},
    "Adadelta": {},
    "Adadelta other": {"rho": 0.8, "epsilon": 1e-3},
    "Adamax": {},
    "Adamax other": {"beta_1": 0.8, "beta_2": 0.9, "epsilon": 1e-3},
    "Nadam": {},
    "Nadam other": {"beta_1": 0.5, "beta_2": 0.9, "epsilon": 1e-3},
    "Lion": {},
    "Lion other": {"beta_1": 0.7, "beta_2": 0.8, "weight_decay": 0.004},
    "Ftrl": {},
    "Ftrl other": {
        "learning_rate_power": -0.7,
        "initial_accumulator_value": 0.3,
        "l1_regularization_strength": 0.02,
        "l2_regularization_strength": 0.03,
        "l2_shrinkage_regularization_strength": 0.04,
        "beta": 0.1,
    },
    "Ftrl linear": {"learning_rate_power": -1.0, "beta": 0.1, "weight_decay": 0.004},
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
    return [int(value) for value in values.view(f"uint{8 * values.itemsize}")]


def updates(name: str) -> dict[str, Any]:
    """What Keras makes of an optimizer's gradients, by dtype of the variables."""
    optimizer = optimizer_of(name)
    return {
        "optimizer": json.loads(describe(optimizer)),
        "weight_decay": optimizer.weight_decay or 0.0,
        "weights": {dtype: weights(name, dtype) for dtype in SHOWN},
    }


def optimizer_of(name: str) -> Any:
    kind = getattr(keras.optimizers, name.split()[0])
    return kind(learning_rate=0.1, **OPTIMIZERS[name])


def weights(name: str, dtype: str) -> dict[int, list[int]]:
    """The bits of the weights, by step."""
    optimizer = optimizer_of(name)
    parts = ELEMENTS if name.startswith("Ftrl") else 1
    start = np.split(np.linspace(-1, 1, ELEMENTS, dtype=np.float32), parts)
    variables = [keras.Variable(values, dtype=dtype) for values in start]
    optimizer.build(variables)
    apply = tf.function(optimizer.apply) if parts > 1 else optimizer.apply

    shown = {}
    for step in range(1, SHOWN[dtype][-1] + 1):
        optimizer.learning_rate = learning_rate(step)
        apply([tf.cast(part, dtype) for part in np.split(gradient(step), parts)])
        if step in SHOWN[dtype]:
            shown[step] = bits(np.concatenate([each.numpy() for each in variables]))
    return shown


def all_updates() -> dict[str, Any]:
    return {"keras": keras.__version__, **{name: updates(name) for name in OPTIMIZERS}}


if __name__ == "__main__":
    FILE.write_text(json.dumps(all_updates(), indent=1) + "\n")
