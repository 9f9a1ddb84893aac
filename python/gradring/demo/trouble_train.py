"""The demo's training, with one rank that is slow or dies; ``gradring demo`` runs it."""

from __future__ import annotations

import argparse
import os
import signal
import time

import keras

import gradring
from gradring.demo.train import (
    GLOBAL_BATCH,
    SEED,
    STEPS_PER_EPOCH,
    build_model,
    build_optimizer,
    choose_strategy,
    load_data,
    make_step,
    training_batches,
)

EVERY_S = 1.0


def main() -> None:
    """Trains until the end, or until a rank has died."""
    arguments = parse_arguments()
    keras.utils.set_random_seed(SEED)
    strategy = choose_strategy("gradring")
    rank = strategy.communicator.rank
    training, _ = load_data()
    with strategy.scope():
        model, optimizer = build_model(), build_optimizer()
    batches = training_batches(*training, GLOBAL_BATCH, arguments.epochs)
    batches = iter(strategy.experimental_distribute_dataset(batches))
    step = make_step(strategy, model, optimizer)
    steps = arguments.epochs * STEPS_PER_EPOCH
    with gradring.Monitor(strategy, samples_per_step=GLOBAL_BATCH, every_s=EVERY_S) as monitor:
        for number in range(steps):
            if rank == arguments.slow_rank:
                time.sleep(arguments.slow_ms / 1000)
            if rank == arguments.kill and number == steps // 2:
                os.kill(os.getpid(), signal.SIGKILL)
            float(step(batches))
            monitor.step()


def parse_arguments() -> argparse.Namespace:
    """What ``gradring demo`` asks for."""
    parser = argparse.ArgumentParser(description="train with a rank that is slow or dies")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--slow-rank", type=int)
    parser.add_argument("--slow-ms", type=float, default=20.0)
    parser.add_argument("--kill", type=int)
    return parser.parse_args()


if __name__ == "__main__":
    main()
