"""Keras 2 (`tf_keras`) under the strategy, which needs no repair.

`tf_keras` wants the package `tensorflow`; beside `tensorflow-cpu`, `make setup` installs it with
`--no-deps`. Without it there is nothing to test.
"""

import importlib.util
from typing import Any

import pytest
from keras_models import BATCH, assert_trained_alike, dataset, strategy_of
from tf_worker import join

from gradring.testing import run_ranks

#: How far float32 weights may be from those of one process; float16 rounds elsewhere.
TOLERANCES = {"plain": 1e-5, "global_clipnorm": 1e-5, "mixed precision": 1e-3}


def train_all() -> Any:
    import tensorflow as tf

    with join() as comm:
        return tf.keras.__name__, {kind: train(comm, kind) for kind in TOLERANCES}


def train(comm: Any, kind: str) -> Any:
    import tensorflow as tf

    keras = tf.keras
    keras.utils.set_random_seed(comm.rank + 1)
    policy = "mixed_float16" if kind == "mixed precision" else "float32"
    with strategy_of(comm).scope():
        model = keras.Sequential(
            [
                keras.layers.Input((8,)),
                keras.layers.Dense(16, activation="tanh", dtype=policy),
                keras.layers.Dense(3),
            ]
        )
        clip = 0.05 if kind == "global_clipnorm" else None
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=clip)
        if kind == "mixed precision":
            optimizer = keras.mixed_precision.LossScaleOptimizer(optimizer)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy"])
    validation = dataset(count=2 * BATCH)
    history = model.fit(dataset(), epochs=2, verbose=0, validation_data=validation).history
    return {"weights": model.get_weights(), "optimizer": [], "logs": history}


@pytest.mark.skipif(importlib.util.find_spec("tf_keras") is None, reason="needs tf_keras")
def test_two_workers_train_as_one_process() -> None:
    legacy = {"TF_USE_LEGACY_KERAS": "1"}
    (name, first), (_, second) = run_ranks(train_all, 2, env=legacy)
    ((_, alone),) = run_ranks(train_all, 1, env=legacy)
    assert name.startswith("tf_keras")
    for kind, tolerance in TOLERANCES.items():
        assert_trained_alike([first[kind], second[kind]], alone[kind], tolerance)
