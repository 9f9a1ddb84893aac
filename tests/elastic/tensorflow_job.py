"""A process of an elastic job under TensorFlow: a loop of its own, then `fit`.

Its name says what becomes of it: "killed" dies in the loop, "first", the chief, in `fit`, and
"leaving" gets SIGTERM there; "joining" takes the place of "killed", and is left over.
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

from gradring.elastic.job import _Job
from gradring.errors import ConfigError
from gradring.tensorflow import CustomCollectiveStrategy, GradientReducer, elastic

# Several processes share a core.
tf.config.threading.set_inter_op_parallelism_threads(1)
tf.config.threading.set_intra_op_parallelism_threads(1)

NAME, DIRECTORY = sys.argv[1], Path(sys.argv[2])
STEPS, EPOCHS, GLOBAL_BATCH = 10, 3, 12
LOOP_STEPS = 8

traces = {"strategy": 0, "reducer": 0, "fit": 0, "validation": 0}


def tell(what: str, **facts: Any) -> None:
    """A line for the test."""
    facts |= {"what": what, "rank": comm.rank, "size": comm.world_size}
    facts |= {"generation": comm.generation, "traces": dict(traces)}
    with (DIRECTORY / NAME).open("a") as file:
        file.write(json.dumps(facts) + "\n")


class Model(keras.Sequential):  # type: ignore[misc]
    """Counts how often its steps are traced."""

    def train_step(self, data: Any) -> Any:
        """As ever."""
        traces["fit"] += 1
        return super().train_step(data)

    def test_step(self, data: Any) -> Any:
        """As ever."""
        traces["validation"] += 1
        return super().test_step(data)


def compiled() -> Model:
    """A small model."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Input((4,)), keras.layers.Dense(8, activation="tanh")]
    model = Model([*layers, keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(optimizer, "mse", steps_per_execution=2, jit_compile=False)
    return model


def digest(*variables: Any) -> str:
    """Of their bits."""
    parts = [np.asarray(tf.convert_to_tensor(variable)).tobytes() for variable in variables]
    return hashlib.sha256(b"".join(parts)).hexdigest()


rng = np.random.default_rng(0)
inputs = rng.normal(size=(STEPS * GLOBAL_BATCH, 4)).astype(np.float32)
batches = tf.data.Dataset.from_tensor_slices((inputs, inputs.sum(1))).batch(GLOBAL_BATCH)

strategy = CustomCollectiveStrategy()
comm = strategy.communicator
with strategy.scope():
    slope = tf.Variable(0.0)
    model = compiled()
counted = tf.Variable(0.0)
reduce_gradients = GradientReducer(communicator=comm)


@tf.function  # type: ignore[untyped-decorator]
def strategy_step(batch: Any) -> Any:
    """Takes the slope to the mean of the inputs."""
    traces["strategy"] += 1

    def in_replica(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((batch - slope) ** 2) / (GLOBAL_BATCH * 4)
        gradient = tape.gradient(loss, slope)
        total = tf.distribute.get_replica_context().all_reduce("SUM", gradient)
        slope.assign_sub(0.2 * total)
        return loss

    return strategy.reduce("SUM", strategy.run(in_replica, (batch,)), axis=None)


@tf.function  # type: ignore[untyped-decorator]
def reducer_step() -> None:
    """Counts steps, if all ranks take part."""
    traces["reducer"] += 1
    (one,) = reduce_gradients([tf.ones([])])
    counted.assign_add(one)


def joins(state: elastic.State) -> bool:
    """Whether another process waits to join."""
    job = state._after_commit.__self__  # type: ignore[union-attr]
    assert isinstance(job, _Job) and job._participant is not None
    return bool(job._participant.joiners)


looped = elastic.State(variables=[slope, counted], step=0)
try:
    tf.function(looped.commit)()
except ConfigError as refusal:
    assert "outside of a tf.function" in str(refusal)
else:
    raise AssertionError("it has committed symbols")


@elastic.run(strategy, max_workers=3)
def loop(state: elastic.State) -> None:
    """A loop of its own; a commit comes after every second step."""
    tell("loop begins", step=state.step, replicas=strategy.num_replicas_in_sync)
    data = strategy.experimental_distribute_dataset(batches.map(lambda x, _: x).skip(state.step))
    for batch in data:
        strategy_step(batch)
        reducer_step()
        state.step += 1
        if NAME == "killed" and state.step == 5:
            while not joins(state):
                pass
            os.kill(os.getpid(), signal.SIGKILL)
        if state.step % 2 == 0:
            state.commit()
        if state.step == LOOP_STEPS:
            break
    tell("loop ends", digest=digest(slope, counted), counted=float(counted.numpy()))


class Incidents(keras.callbacks.Callback):  # type: ignore[misc]
    """What happens to this process in `fit`."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """After a commit, and before the next."""
        step = began_at + batch + 1
        if NAME == "first" and (fitted.epoch, step) == (1, 6):
            os.kill(os.getpid(), signal.SIGKILL)
        if NAME == "leaving" and (fitted.epoch, step) == (2, 6):
            os.kill(os.getpid(), signal.SIGTERM)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Compared between the ranks."""
        variables = [*model.trainable_variables, *model.optimizer.variables]
        tell("epoch ends", epoch=epoch, logs=logs, digest=digest(*variables))


def callbacks() -> list[Any]:
    """Those of every process."""
    return [
        keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1)),
        keras.callbacks.EarlyStopping(monitor="val_loss", patience=EPOCHS),
    ]


fitted = elastic.State(model=model, epoch=0, step=0, stopped=False)
began_at = 0


@elastic.run(strategy, max_workers=3)
def train(state: elastic.State) -> None:
    """Keras' own loop."""
    global began_at
    began_at = state.step
    tell("fit begins", epoch=state.epoch, step=state.step)
    options = {
        "validation_data": batches.take(3),
        "callbacks": [*callbacks(), Incidents(), elastic.CommitState(state, every_steps=4)],
        "verbose": 0,
    }
    if state.step:
        rest = batches.skip(state.step)
        model.fit(rest, initial_epoch=state.epoch, epochs=state.epoch + 1, **options)
        began_at = 0
    assert not state.stopped
    model.fit(batches, initial_epoch=state.epoch, epochs=EPOCHS, **options)


tell("formed")
loop(looped)
train(fitted)

alone = compiled()
alone.fit(batches, epochs=EPOCHS, callbacks=callbacks(), validation_data=batches.take(3), verbose=0)
furthest = max(
    float(np.abs(ours - theirs).max())
    for ours, theirs in zip(model.get_weights(), alone.get_weights(), strict=True)
)
tell("end", furthest=furthest)
