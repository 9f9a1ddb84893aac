"""The demo's training, with one rank that is slow or dies; ``gradring demo`` runs it.

With ``--checkpoint`` it saves after each epoch, and a restart goes on from there.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path

import keras
import tensorflow as tf

import gradring
from gradring.demo.train import (
    GLOBAL_BATCH,
    SEED,
    STEPS_PER_EPOCH,
    accuracy,
    build_model,
    build_optimizer,
    choose_strategy,
    load_data,
    make_step,
    training_batches,
)
from gradring.tensorflow import save

EVERY_S = 1.0
LOST_STEPS = 7
"""After the checkpoint in the middle: what the restart has to do again."""


def main() -> None:
    """Trains until the end, or until a rank has died."""
    arguments = parse_arguments()
    keras.utils.set_random_seed(SEED)
    strategy = choose_strategy("gradring")
    rank = strategy.communicator.rank
    training, test = load_data()
    with strategy.scope():
        model, optimizer = build_model(), build_optimizer()
        optimizer.build(model.trainable_variables)
        done = tf.Variable(0, dtype=tf.int64)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, done=done)
    if arguments.checkpoint and arguments.checkpoint.with_suffix(".index").exists():
        checkpoint.read(str(arguments.checkpoint)).assert_consumed()
    first = int(done.numpy())
    if rank == 0 and first:
        print(f"resumes after step {first}")
    batches = training_batches(*training, GLOBAL_BATCH, arguments.epochs).skip(first)
    batches = iter(strategy.experimental_distribute_dataset(batches))
    step = make_step(strategy, model, optimizer)
    steps = arguments.epochs * STEPS_PER_EPOCH
    # The rank that dies does so once.
    dies = rank == arguments.kill and os.environ.get("GRADRING_RESTART", "0") == "0"
    loss = float("nan")
    with gradring.Monitor(
        strategy, samples_per_step=GLOBAL_BATCH, every_s=EVERY_S, first_step=first
    ) as monitor:
        for number in range(first, steps):
            if rank == arguments.slow_rank:
                time.sleep(arguments.slow_ms / 1000)
            if dies and number == steps // 2 + LOST_STEPS:
                os.kill(os.getpid(), signal.SIGKILL)
            loss = float(step(batches))
            monitor.step(loss=loss)
            if arguments.checkpoint and (number + 1) % STEPS_PER_EPOCH == 0:
                monitor.pause()
                done.assign(number + 1)
                save(checkpoint, arguments.checkpoint)
    if rank == 0:
        reached = accuracy(tf.function(model), *test)
        print(f"finished {steps} steps: loss {loss:.4f}, test accuracy {reached:.3f}")


def parse_arguments() -> argparse.Namespace:
    """What ``gradring demo`` asks for."""
    parser = argparse.ArgumentParser(description="train with a rank that is slow or dies")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--slow-rank", type=int)
    parser.add_argument("--slow-ms", type=float, default=20.0)
    parser.add_argument("--kill", type=int)
    parser.add_argument("--checkpoint", type=Path, help="prefix of the checkpoint's files")
    return parser.parse_args()


if __name__ == "__main__":
    main()
