"""The same training as in ``train``, which goes on when a worker is lost and takes in another one.

```
gradring run -np 4 --min-np 2 -- python -m gradring.tools.demo.elastic_train
```
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import gradring.elastic
import gradring.tensorflow
import gradring.tensorflow.elastic
from gradring.tools.demo import train

COMMIT_EVERY = 10
KILLED_AT = 57
#: Real steps take longer than those on images of 8 x 8 pixels.
PAUSE_S = 0.05


def main() -> None:
    """Trains until all steps are done, with as many workers as there are."""
    arguments = _parse_arguments()
    keras.utils.set_random_seed(train.SEED)
    strategy = gradring.tensorflow.CustomCollectiveStrategy()
    comm = strategy.communicator
    training, test = train.load_data()
    with strategy.scope():
        model, optimizer = train.build_model(), train.build_optimizer()
        optimizer.build(model.trainable_variables)
    state = gradring.tensorflow.elastic.State(model=model, optimizer=optimizer, step=0)
    step = train.make_step(strategy, model, optimizer)
    epochs = -(-arguments.steps // train.STEPS_PER_EPOCH)

    @gradring.elastic.run(strategy)
    def train_on(state: Any) -> None:
        print(
            f"generation {comm.generation}: rank {comm.rank} of {comm.world_size} trains on after "
            f"step {state.step} at {time.monotonic():.3f} s",
            flush=True,
        )
        batches = train.training_batches(*training, train.GLOBAL_BATCH, epochs).skip(state.step)
        batches = iter(strategy.experimental_distribute_dataset(batches))
        first = state.step + 1
        while state.step < arguments.steps:
            time.sleep(PAUSE_S)
            if comm.generation == 1 and comm.rank == arguments.kill and state.step == KILLED_AT:
                print(f"killed after step {state.step} at {time.monotonic():.3f} s", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            loss, _ = step(batches)
            float(loss)
            state.step += 1
            if state.step == first:
                print(f"step {first} ended at {time.monotonic():.3f} s", flush=True)
            if state.step % COMMIT_EVERY == 0:
                state.commit()

    train_on(state)
    reached = train.accuracy(tf.function(model), *test)
    print(
        f"{state.step} steps: test accuracy {reached:.3f}, weights {_hash_of(model.weights)}",
        flush=True,
    )


def _hash_of(weights: list[Any]) -> str:
    digest = hashlib.sha256()
    for weight in weights:
        digest.update(np.ascontiguousarray(weight).tobytes())
    return digest.hexdigest()[:16]


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="train elastically on handwritten digits")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--kill", type=int, help="a rank that dies once")
    return parser.parse_args()


if __name__ == "__main__":
    main()
