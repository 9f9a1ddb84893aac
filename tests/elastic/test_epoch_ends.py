"""A process is killed, or joins, after each step of an epoch of `fit`, the last one too."""

from __future__ import annotations

import itertools
import os
import signal
from typing import Any

import numpy as np
import pytest

import gradring
from elastic.training import LIMIT_S
from faults.stage import Stage
from gradring.machine.ports import free_ports
from gradring.testing import run_ranks
from support.chosen import marked_rows
from support.waiting import wait_until

STEPS, BATCH, EPOCHS, EPOCH = 4, 6, 3, 1
"""Of the dataset; and the epoch in which it happens."""
RATE = 0.1

CASES = [*itertools.product(("killed", "joins"), ("known", "unknown"), range(1, STEPS + 1))]
#: After the last step, nothing is left of the epoch.
QUICK = {("joins", "known", STEPS), ("joins", "unknown", STEPS), ("killed", "known", STEPS)}


def data() -> tuple[np.ndarray, np.ndarray]:
    inputs = np.random.default_rng(0).normal(size=(STEPS * BATCH, 3)).astype(np.float32)
    return inputs, inputs @ np.array([[1.0], [-2.0], [3.0]], np.float32)


def expected() -> np.ndarray:
    """The weights after each batch of each epoch once."""
    inputs, labels = data()
    weights = np.zeros((3, 1), np.float32)
    for x, y in EPOCHS * [*zip(np.split(inputs, STEPS), np.split(labels, STEPS), strict=True)]:
        weights -= RATE * 2 / BATCH * x.T @ (x @ weights - y)
    return weights


def train_on(stage: Stage, address: str, what: str, size: str, step: int) -> Any:
    """The program of docs/elastic.md, and what happens to it after that step."""
    import keras
    import tensorflow as tf

    from gradring.tensorflow import CustomCollectiveStrategy, elastic

    place, founders = int(os.environ["GRADRING_RANK"]), 2 if what == "killed" else 1
    if place < founders:
        comm = gradring.init(rank=place, world_size=founders, rendezvous=address)
    else:
        stage.wait("come", within_s=LIMIT_S)
        comm = gradring.init(join=[address])
    strategy = CustomCollectiveStrategy(communicator=comm)
    with strategy.scope():
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.layers.Input((3,)), dense])
        # A process that joins has yet to make what the others have of a metric.
        model.compile(keras.optimizers.SGD(RATE), "mse", metrics=["mae"])
    batches = tf.data.Dataset.from_tensor_slices(data()).batch(BATCH)
    if size == "unknown":
        batches = batches.filter(lambda *_: True)
    state = elastic.State(model=model, epoch=0, step=0)
    begun: list[tuple[int, int, int]] = []

    class Happen(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            # In its first group the epoch is whole, so batches are counted from its beginning.
            if place != founders - 1 or len(begun) > 1 or (self.epoch, batch + 1) != (EPOCH, step):
                return
            job = state._after_commit.__self__  # type: ignore[union-attr]
            stage.tell("come")
            wait_until(lambda: bool(job._participant.joiners), "one would join", LIMIT_S)
            if what == "killed":
                os.kill(os.getpid(), signal.SIGKILL)

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

    @gradring.elastic.run(strategy, min_workers=founders)
    def train(state: elastic.State) -> None:
        begun.append((comm.world_size, state.epoch, state.step))
        options = {
            "callbacks": [Happen(), elastic.CommitState(state, every_steps=1)],
            "validation_data": batches.take(1),
            "verbose": 0,
        }
        if state.step:
            rest = batches.skip(state.step)
            model.fit(rest, initial_epoch=state.epoch, epochs=state.epoch + 1, **options)
        model.fit(batches, initial_epoch=state.epoch, epochs=EPOCHS, **options)

    train(state)
    return begun, model.get_weights()[0]


@pytest.mark.parametrize(("what", "size", "step"), marked_rows(CASES, QUICK))
def test_fit_goes_on_after_each_step_of_an_epoch(
    stage: Stage, what: str, size: str, step: int
) -> None:
    ranks = 3 if what == "killed" else 2
    address = f"127.0.0.1:{free_ports(1)[0]}"
    outcomes = run_ranks(
        train_on,
        ranks,
        *(stage, address, what, size, step),
        check=False,
        env={"TF_CPP_MIN_LOG_LEVEL": "3"},
        timeout=LIMIT_S,
    )
    said = "\n".join(outcome.details() for outcome in outcomes)
    lost = [outcome.exit_code for outcome in outcomes if not outcome.ok]
    assert lost == ([-signal.SIGKILL] if what == "killed" else []), said
    (first, weights), (joined, others) = (each.value for each in outcomes if each.ok)
    assert (weights == others).all()
    np.testing.assert_allclose(weights, expected(), atol=1e-5)
    # Nothing is done twice but what came after the last commit, and an epoch that has ended is one.
    size_of_group, epoch, position = joined[-1]
    assert (size_of_group, *first[-1][1:]) == (2, epoch, position)
    if size == "known" and what == "joins":
        assert (epoch, position) == ((EPOCH + 1, 0) if step == STEPS else (EPOCH, step))
    assert position < STEPS or size == "unknown"
