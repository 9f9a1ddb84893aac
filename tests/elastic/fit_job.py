"""A process of an elastic job that trains with `fit`, until its group is whole again.

Arguments: a directory, and which job. In "metrics", ranks 1 and 2 die in their first epoch, and two
others join; in "mixed", rank 0 does, and another one takes its place. In "grows" one rank begins,
and two join.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from gradring.tensorflow import CustomCollectiveStrategy, elastic

DIRECTORY, JOB = Path(sys.argv[1]), sys.argv[2]
VICTIMS = {"metrics": (1, 2), "mixed": (0,), "grows": ()}[JOB]
RANKS, ROWS, GLOBAL_BATCH, CLASSES = 3, 96, 12, 3
COMMIT_STEPS, DEATH_STEP = 3, 5

rng = np.random.default_rng(0)
inputs = rng.normal(size=(ROWS, 4)).astype(np.float32)
labels = inputs[:, :CLASSES].argmax(axis=1)
batches = tf.data.Dataset.from_tensor_slices((inputs, labels)).batch(GLOBAL_BATCH)

strategy = CustomCollectiveStrategy()
comm = strategy.communicator


def tell(what: str, **facts: Any) -> None:
    """A line for the test."""
    facts |= {"what": what, "rank": comm.rank, "size": comm.world_size}
    facts |= {"generation": comm.generation, "joined": "GRADRING_JOIN" in os.environ}
    with (DIRECTORY / f"{os.getpid()}.told").open("a") as file:
        file.write(json.dumps(facts) + "\n")


class Rows(keras.metrics.Metric):  # type: ignore[misc]
    """Counts the rows that this replica has seen in the epoch."""

    def __init__(self) -> None:
        super().__init__(name="rows")
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """As ever."""
        self.count.assign_add(tf.cast(tf.shape(y_true)[0], tf.float32))

    def result(self) -> Any:
        """As ever."""
        return self.count.value


def compiled() -> Any:
    """A model with every kind of state that a layer and an optimizer can have."""
    if JOB == "mixed":
        keras.mixed_precision.set_global_policy("mixed_float16")
    scale = keras.layers.Normalization()
    scale.adapt(inputs)
    model = keras.Sequential(
        [
            keras.layers.Input((4,)),
            scale,
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.1, seed=1),
            keras.layers.Dense(CLASSES, dtype="float32"),
        ]
    )
    # By weights, what a replica has of a mean takes a reduction.
    mean = "mean_with_sample_weight" if JOB == "grows" else "sum_over_batch_size"
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=mean)
    metrics = ["accuracy", Rows(), keras.metrics.SparseTopKCategoricalAccuracy(2, name="top2")]
    weighted = ["accuracy", keras.metrics.SparseCategoricalCrossentropy(from_logits=True)]
    model.compile("adam", loss, metrics=metrics, weighted_metrics=weighted)
    return model


class Watch(keras.callbacks.Callback):  # type: ignore[misc]
    """Has metrics of its own, which it makes when it needs them, and keeps."""

    mean: Any = None
    areas: Any = None
    #: Of this group.
    epochs = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Makes them in the first `fit` of its process."""
        if self.mean is None:
            with strategy.scope():
                self.mean, self.areas = keras.metrics.Mean(), keras.metrics.AUC()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """They are of an epoch."""
        self.mean.reset_state()
        self.areas.reset_state()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """AUC makes its variables when it is first updated."""

        def in_replica() -> None:
            self.mean.update_state(comm.rank + 1.0)
            self.areas.update_state([0.0, 1.0], [0.25, 0.75])

        strategy.run(in_replica)
        dies = comm.generation == 1 and comm.rank in VICTIMS
        if dies and "GRADRING_JOIN" not in os.environ and batch + 1 == DEATH_STEP:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Ends the training when all have joined, after a whole epoch."""
        self.epochs += 1
        is_whole = comm.generation > 1 and comm.world_size == RANKS
        self.model.stop_training |= is_whole and self.epochs > 1
        own = {"mean": float(self.mean.result()), "area": float(self.areas.result())}
        tell("epoch ends", epoch=epoch, logs=logs, own=own)


def digest(*variables: Any) -> str:
    """Of their bits."""
    parts = [np.asarray(tf.convert_to_tensor(variable)).tobytes() for variable in variables]
    return hashlib.sha256(b"".join(parts)).hexdigest()


with strategy.scope():
    model = compiled()
watch = Watch()
state = elastic.State(model=model, epoch=0, step=0, stopped=False)


@elastic.run(strategy, min_workers=1, max_workers=RANKS)
def train(state: elastic.State) -> None:
    """The program of docs/elastic.md, with what a user adds to it."""
    tell("train", epoch=state.epoch, step=state.step)
    watch.epochs = 0
    options = {
        "callbacks": [
            watch,
            keras.callbacks.EarlyStopping("val_loss", patience=10**6, restore_best_weights=True),
            keras.callbacks.ReduceLROnPlateau("val_loss", patience=3),
            elastic.CommitState(state, every_steps=COMMIT_STEPS),
        ],
        "class_weight": {0: 1.0, 1: 2.0, 2: 0.5},
        "validation_data": batches.take(4),
        "verbose": 0,
    }
    if state.step:
        rest = batches.skip(state.step)
        model.fit(rest, initial_epoch=state.epoch, epochs=state.epoch + 1, **options)
    if not state.stopped:
        model.fit(batches, initial_epoch=state.epoch, epochs=10**6, **options)


train(state)
found = model.evaluate(batches, return_dict=True, verbose=0)
alone = compiled()
alone.set_weights(model.get_weights())
expected = alone.evaluate(batches, return_dict=True, verbose=0)
variables = [*model.trainable_variables, *model.non_trainable_variables, *model.optimizer.variables]
tell("end", digest=digest(*variables), found=found, expected=expected)
