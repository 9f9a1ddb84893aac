"""An elastic training by `updates.Sharded`, one of whose ranks is killed once.

Run as ``python sharded_job.py FILE``; the rank that is killed makes the file before.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from gradring import updates
from gradring.tensorflow import CustomCollectiveStrategy, check_replicas, elastic

STEPS, BATCH, COMMIT_EVERY, KILLED_AT = 20, 12, 5, 13

killed = Path(sys.argv[1])
strategy = CustomCollectiveStrategy(update=updates.Sharded())
group = strategy.communicator
is_victim = group.rank == 2 and not killed.exists()
keras.utils.set_random_seed(1)
with strategy.scope():
    model = keras.Sequential(
        [keras.Input([16]), keras.layers.Dense(200, activation="relu"), keras.layers.Dense(1)]
    )
    optimizer = keras.optimizers.Adam(0.01)
state = elastic.State(model=model, optimizer=optimizer, step=0)
x = np.random.default_rng(0).normal(size=[STEPS * BATCH, 16]).astype(np.float32)
y = x.sum(1, keepdims=True)


@tf.function  # type: ignore[untyped-decorator]
def train_step(x: Any, y: Any) -> None:
    def replica_step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((model(x) - y) ** 2) / BATCH
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    strategy.run(replica_step, args=(x, y))


def train(state: Any) -> None:
    while state.step < STEPS:
        if state.step == KILLED_AT and is_victim:
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        own = slice(state.step * BATCH + group.rank, (state.step + 1) * BATCH, group.world_size)
        train_step(tf.constant(x[own]), tf.constant(y[own]))
        state.step += 1
        if state.step % COMMIT_EVERY == 0:
            state.commit()


if group.world_size == 1:
    train(state)
else:
    elastic.run(strategy, min_workers=2, max_workers=3)(train)(state)
check_replicas(tf.train.Checkpoint(model=model, optimizer=optimizer))
sums = [float(np.abs(v.numpy()).sum()) for v in (*model.variables, *optimizer.variables)]
print("END", *sums, flush=True)
