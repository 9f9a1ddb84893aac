"""Keras 2 (`tf_keras`) under the strategy, which needs no repair.

`tf_keras` wants the package `tensorflow`; beside `tensorflow-cpu`, `make setup` installs it with
`--no-deps`. Without it there is nothing to test.
"""

import importlib.util
from typing import Any

import pytest

from gradring.errors import MismatchError
from gradring.testing import run_ranks
from support.keras_models import BATCH, assert_trained_alike, dataset, strategy_of
from support.tf_worker import join

#: How far float32 weights may be from those of one process; float16 rounds elsewhere.
TOLERANCES = {"plain": 1e-5, "global_clipnorm": 1e-5, "mixed precision": 1e-3}


def train_all() -> Any:
    import tensorflow as tf

    with join() as comm:
        trained = {kind: train(comm, kind) for kind in TOLERANCES}
        return tf.keras.__name__, {**trained, "stopped": stopped(comm)}


def stopped(comm: Any) -> Any:
    """How many epochs a training has that one rank alone would stop; what a rank alone is told."""
    import tensorflow as tf

    with strategy_of(comm).scope():
        model = tf.keras.Sequential([tf.keras.layers.Input((8,)), tf.keras.layers.Dense(3)])
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss)
    stops = tf.keras.callbacks.EarlyStopping("loss", patience=0, min_delta=1e3)
    own = [stops] if comm.rank == comm.world_size - 1 else []
    epochs = len(model.fit(dataset(), epochs=4, verbose=0, callbacks=own).epoch)
    try:
        model.fit(dataset(), epochs=1 + comm.rank, verbose=0)
    except MismatchError as error:
        return epochs, str(error).partition(";")[0]
    return epochs, ""


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
    for epochs, said in (first["stopped"], second["stopped"]):
        assert epochs == alone["stopped"][0] == 2
        assert said.startswith("fit: rank 1 on ") and " has epochs=2, and rank 0 on " in said
    for kind, tolerance in TOLERANCES.items():
        assert_trained_alike([first[kind], second[kind]], alone[kind], tolerance)
