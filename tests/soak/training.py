"""A round of training: Keras' fit, then a loop of one's own; all ranks end with the same bits."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

from gradring.group.communicator import Communicator
from gradring.tensorflow import CustomCollectiveStrategy
from soak.collectives import WrongResultError, strike
from soak.plan import Plan

GLOBAL_BATCH = 16
STEPS_OF_AN_EPOCH = 50
FEATURES, CLASSES = 8, 3

# Several ranks share a core, and pools of threads grow for as long as they can.
tf.config.threading.set_inter_op_parallelism_threads(1)
tf.config.threading.set_intra_op_parallelism_threads(1)


class Round:
    """One round on one process; half of its steps are taken by fit."""

    def __init__(self, plan: Plan, process: int, look: Callable[[int], None]) -> None:
        """As `collectives.Round`."""
        self._plan, self._look = plan, look
        self._at_fault = process == plan.faulty
        self.done = self.steps = self.phase = 0

    def play(self, comm: Communicator) -> None:
        """Trains, and strikes when it is time to."""
        try:
            self._play(comm)
        finally:
            self.done = comm.stats()["count"]

    def forget(self) -> None:
        """Lets Keras drop what belongs to models that are gone."""
        keras.backend.clear_session()

    def _play(self, comm: Communicator) -> None:
        keras.utils.set_random_seed(self._plan.length)
        strategy = CustomCollectiveStrategy(communicator=comm)
        with strategy.scope():
            model = keras.Sequential(
                [
                    keras.layers.Input((FEATURES,)),
                    keras.layers.Dense(16, "tanh"),
                    keras.layers.Dense(CLASSES),
                ]
            )
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.Adam(0.01), loss)
        epochs = max(1, self._plan.length // STEPS_OF_AN_EPOCH // 2)
        after = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: self._step(comm),
            on_epoch_end=lambda epoch, logs: self._tell(comm),
        )
        data = examples()
        model.fit(
            data,
            epochs=epochs,
            steps_per_epoch=STEPS_OF_AN_EPOCH,
            shuffle=False,
            verbose=0,
            callbacks=[after],
        )
        check(comm, model)
        self.phase = 1
        self._loop(comm, strategy, model, iter(strategy.experimental_distribute_dataset(data)))
        check(comm, model)

    def _loop(self, comm: Communicator, strategy: Any, model: Any, batches: Any) -> None:
        with strategy.scope():
            optimizer = keras.optimizers.SGD(0.01)
            optimizer.build(model.trainable_variables)

        def replica_step(features: Any, labels: Any) -> Any:
            with tf.GradientTape() as tape:
                each = keras.losses.sparse_categorical_crossentropy(
                    labels, model(features, training=True), from_logits=True
                )
                loss = tf.reduce_sum(each) / GLOBAL_BATCH
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        @tf.function  # type: ignore[untyped-decorator]
        def step(batch: Any) -> Any:
            return strategy.reduce("sum", strategy.run(replica_step, args=batch), axis=None)

        while self.steps < self._plan.length:
            loss = float(step(next(batches)))
            if not np.isfinite(loss):
                raise WrongResultError(f"the loss of step {self.steps} is {loss}")
            self._step(comm)
            if self.steps % STEPS_OF_AN_EPOCH == 0:
                self._tell(comm)

    def _step(self, comm: Communicator) -> None:
        if self._at_fault and self.steps == self._plan.fault_at:
            strike(self._plan.fault, comm)
        self.steps += 1

    def _tell(self, comm: Communicator) -> None:
        self.done = comm.stats()["count"]
        self._look(self.done)


def examples() -> Any:
    """Endless batches for all workers together."""
    dice = np.random.default_rng(1)
    features = dice.normal(size=(256, FEATURES)).astype(np.float32)
    labels = (np.abs(features[:, 0]) + np.abs(features[:, 1])).astype(np.int32) % CLASSES
    return tf.data.Dataset.from_tensor_slices((features, labels)).repeat().batch(GLOBAL_BATCH)


def check(comm: Communicator, model: Any) -> None:
    """Raises if the ranks' weights differ in a bit."""
    weights = b"".join(weight.tobytes() for weight in model.get_weights())
    digest = np.frombuffer(hashlib.sha256(weights).digest(), np.uint8)
    of_all = comm.all_gather(digest).reshape(comm.world_size, -1)
    if not (of_all == digest).all():
        raise WrongResultError("the ranks' weights differ")
