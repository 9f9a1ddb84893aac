"""Training of a small convolutional network on handwritten digits.

This is an ordinary training script, the same for every strategy. Only one line differs:

```diff
+ import gradring.tensorflow
- strategy = tf.distribute.MultiWorkerMirroredStrategy()
+ strategy = gradring.tensorflow.CustomCollectiveStrategy()
```

``gradring demo`` runs it with each strategy. You can run it too:

```
gradring run -np 2 python -m gradring.tools.demo.train --strategy gradring
```

The option ``--kill R`` makes it elastic: it continues without a lost worker and admits a new one:

```
gradring run -np 4 --min-np 2 python -m gradring.tools.demo.train --kill 1
```
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from sklearn.datasets import load_digits

import gradring.elastic
import gradring.tensorflow
import gradring.tensorflow.elastic
from gradring.tools.demo.rules import RULES
from gradring.tools.demo.trouble import COMMIT_EVERY

GLOBAL_BATCH = 72
STEPS_PER_EPOCH = 20
#: 1440 of the 1797 images; the others are test images.
TRAINING_IMAGES = GLOBAL_BATCH * STEPS_PER_EPOCH
#: Epochs between two tests of the accuracy.
TESTED_EVERY = 5
SEED = 1
EVERY_S = 1.0
KILLED_AT = 57
#: Pause in each elastic step, since steps of real models take longer.
PAUSE_S = 0.05


def main() -> None:
    """Trains according to the command line."""
    arguments = parse_arguments()
    keras.utils.set_random_seed(SEED)
    strategy = choose_strategy(arguments.strategy, arguments.update)
    if arguments.kill is None:
        train(strategy, arguments)
    else:
        train_elastically(strategy, arguments.epochs * STEPS_PER_EPOCH, arguments.kill)


def train(strategy: Any, arguments: argparse.Namespace) -> None:
    """Trains, and writes measurements and weights to the output directory."""
    rank = 0 if strategy.cluster_resolver is None else int(strategy.cluster_resolver.task_id)
    training, test = load_data()
    model, optimizer = build(strategy)
    batches = training_batches(*training, GLOBAL_BATCH, arguments.epochs)
    batches = iter(strategy.experimental_distribute_dataset(batches))
    step = make_step(strategy, model, optimizer)
    predict = tf.function(model)
    # Strategies of TensorFlow have no communicator, so the monitor only measures their whole steps.
    is_own = hasattr(strategy, "communicator")
    monitored = strategy if is_own else gradring.init(rank=0, world_size=1)
    steps_s = []
    steps = arguments.epochs * STEPS_PER_EPOCH
    # Workers of parameter servers form no group. Each has only its own part of the loss, and its
    # monitor measures its own steps.
    apart = is_own and strategy.communicator.world_size < strategy.num_replicas_in_sync
    share = strategy.num_replicas_in_sync if apart else 1
    stream = io.StringIO() if apart and rank else None
    with gradring.Monitor(
        monitored, samples_per_step=GLOBAL_BATCH, every_s=EVERY_S, stream=stream
    ) as monitor:
        for number in range(1, steps + 1):
            start_s = time.perf_counter()
            if rank == arguments.slow_rank:
                time.sleep(arguments.slow_ms / 1000)
            loss = share * float(step(batches))
            steps_s.append(time.perf_counter() - start_s)
            monitor.step(loss=loss)
            epoch, rest = divmod(number, STEPS_PER_EPOCH)
            if rest or (epoch % TESTED_EVERY and number < steps):
                continue
            monitor.pause()
            if is_own and number == steps:
                gradring.tensorflow.sync_replicas(model)
            reached = accuracy(predict, *test)
            if rank == 0:
                at = f"epoch {epoch}/{arguments.epochs} step {number}"
                print(f"{at} loss {loss:.4f} test accuracy {reached:.3f}")
            monitor.resume()
    if rank == 0:
        counted = strategy.communicator.stats() if is_own else {"bytes_sent": 0}
        sent = (strategy.update_stats() if apart else counted)["bytes_sent"] / 1e6
        print(
            f"finished {steps} steps: loss {loss:.4f}, test accuracy {reached:.3f}, "
            f"{sent:.1f} MB sent by rank 0"
        )
    if arguments.output is not None:
        totals = monitor.totals
        waits_s = (totals.comm_s, totals.wait_s)
        facts = {
            "training": arguments.strategy,
            "rank": rank,
            "steps": steps,
            "samples_per_step": GLOBAL_BATCH // strategy.num_replicas_in_sync,
            "parts_ms": [totals.ms(s) for s in (totals.elapsed_s - sum(waits_s), *waits_s)],
            "percentiles_ms": (1000 * np.quantile(steps_s[1:], (0.5, 0.9, 0.99))).tolist(),
            "accuracy": reached,
            "weights_hash": weights_hash(model.variables),
        }
        np.savez(arguments.output / f"rank-{rank}.npz", *arrays(model.variables))
        (arguments.output / f"rank-{rank}.json").write_text(json.dumps(facts))


def train_elastically(strategy: Any, steps: int, kill: int) -> None:
    """Trains until all steps are done, with all workers that are available.

    Args:
        strategy: A strategy of gradring.
        steps: Total number of steps.
        kill: A rank that dies once.
    """
    comm = strategy.communicator
    training, test = load_data()
    model, optimizer = build(strategy)
    state = gradring.tensorflow.elastic.State(model=model, optimizer=optimizer, step=0)
    step = make_step(strategy, model, optimizer)

    @gradring.elastic.run(strategy)
    def train_on(state: Any) -> None:
        print(
            f"generation {comm.generation}: rank {comm.rank} of {comm.world_size} trains on after "
            f"step {state.step} at {time.monotonic():.3f} s",
            flush=True,
        )
        batches = training_batches(*training, GLOBAL_BATCH, steps // STEPS_PER_EPOCH)
        batches = iter(strategy.experimental_distribute_dataset(batches.skip(state.step)))
        first = state.step + 1
        while state.step < steps:
            time.sleep(PAUSE_S)
            if comm.generation == 1 and comm.rank == kill and state.step == KILLED_AT:
                print(f"killed after step {state.step} at {time.monotonic():.3f} s", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            float(step(batches))
            state.step += 1
            if state.step == first:
                print(f"step {first} ended at {time.monotonic():.3f} s", flush=True)
            if state.step % COMMIT_EVERY == 0:
                state.commit()

    train_on(state)
    reached = accuracy(tf.function(model), *test)
    digest = weights_hash(model.weights)
    print(f"{state.step} steps: test accuracy {reached:.3f}, weights {digest}", flush=True)


def choose_strategy(name: str, update: str) -> Any:
    """Returns the strategy; ``single`` is TensorFlow's default, that of a script without one."""
    if name == "gradring":
        return gradring.tensorflow.CustomCollectiveStrategy(update=RULES[update])
    if name == "multi-worker-mirrored":
        return tf.distribute.MultiWorkerMirroredStrategy()
    return tf.distribute.get_strategy()


def load_data() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Returns images of 8 x 8 pixels in [0, 1] with their digits, for training and for testing."""
    digits = load_digits()
    order = np.random.default_rng(SEED).permutation(len(digits.target))
    images = (digits.images[order, :, :, np.newaxis] / 16.0).astype(np.float32)
    labels = digits.target[order].astype(np.int32)
    training, test = slice(TRAINING_IMAGES), slice(TRAINING_IMAGES, None)
    return (images[training], labels[training]), (images[test], labels[test])


def training_batches(images: Any, labels: Any, size: int, epochs: int) -> Any:
    """Returns batches in the same shuffled order on every rank; tf.distribute splits each."""
    draw = np.random.default_rng(SEED)
    order = np.concatenate([draw.permutation(len(images)) for _ in range(epochs)])
    dataset = tf.data.Dataset.from_tensor_slices(order).batch(size, drop_remainder=True)
    dataset = dataset.map(lambda batch: (tf.gather(images, batch), tf.gather(labels, batch)))
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return dataset.with_options(options).prefetch(2)


def build_model() -> Any:
    """Returns a model of three convolutions and two dense layers, about 73,000 weights.

    All of its functions are smooth. At a kink, as in ReLU or max pooling, rounding can change the
    gradient, so that two correct trainings diverge.
    """
    return keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, padding="same", activation="tanh"),
            keras.layers.Conv2D(64, 3, padding="same", activation="tanh"),
            keras.layers.AveragePooling2D(2),
            keras.layers.Conv2D(64, 3, padding="same", activation="tanh"),
            keras.layers.AveragePooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="tanh"),
            keras.layers.Dense(10),
        ]
    )


def arrays(variables: Iterable[Any]) -> list[NDArray[Any]]:
    """Returns the values of variables. `numpy.array` would warn: they know no ``copy``."""
    return [variable.numpy() for variable in variables]


def weights_hash(variables: Iterable[Any]) -> str:
    """Returns the first 16 hex digits of the SHA-256 of all values, in the model's order."""
    return hashlib.sha256(b"".join(each.tobytes() for each in arrays(variables))).hexdigest()[:16]


def build_optimizer() -> Any:
    """Returns Adam with a learning rate of 0.002."""
    return keras.optimizers.Adam(0.002)


def build(strategy: Any) -> tuple[Any, Any]:
    """Returns model and optimizer under a strategy."""
    with strategy.scope():
        model, optimizer = build_model(), build_optimizer()
        optimizer.build(model.trainable_variables)
    return model, optimizer


def make_step(strategy: Any, model: Any, optimizer: Any) -> Any:
    """Returns a function that trains on the next batch, and returns the loss of the whole batch."""
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")

    def replica_step(images: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            outputs = model(images, training=True)
            loss = loss_of(labels, outputs) / GLOBAL_BATCH
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function  # type: ignore[untyped-decorator]
    def step(batches: Any) -> Any:
        losses = strategy.run(replica_step, args=next(batches))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    return step


def accuracy(predict: Any, images: Any, labels: Any) -> float:
    """Returns the fraction of images whose digit is recognised."""
    return float(np.mean(np.argmax(predict(images), axis=-1) == labels))


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description="train a small network on handwritten digits")
    strategies = ("gradring", "multi-worker-mirrored", "single")
    parser.add_argument("--strategy", choices=strategies, default="gradring")
    parser.add_argument("--update", choices=RULES, default="all-reduce", help="the update rule")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--output", type=Path, help="directory for measurements and weights")
    parser.add_argument("--slow-rank", type=int, help="a rank that sleeps in each step")
    parser.add_argument("--slow-ms", type=float, default=20.0)
    parser.add_argument("--kill", type=int, help="train elastically, and have a rank die once")
    return parser.parse_args()


if __name__ == "__main__":
    main()
