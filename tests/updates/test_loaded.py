"""Weights that a program loads or assigns in the middle of a rule's rounds."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradring import updates
from gradring.testing import run_ranks
from support.tf_worker import join

EVERY, RATE, OUTER_RATE = 5, 0.125, 0.5
#: Without momentum, so that a round's end is known from the round alone.
OUTER = updates.LocalSGD(EVERY, updates.Nesterov(OUTER_RATE, 0.0))
BEGIN, LOADED = np.array([1.0, 2.0]), np.array([4.0, -4.0])
#: Mean over both ranks of the gradients of a step.
MEAN = np.array([1.0, -1.5])
WAYS = ("assign", "checkpoint", "each rank its own", "one rank, and back")
KEEPING = {
    "TopK": updates.AllReduce(compression=updates.TopK(0.05)),
    "PowerSGD": updates.AllReduce(compression=updates.PowerSGD(1)),
    "sync_every": updates.AllReduce(sync_every=4),
}


class Loop:
    """A custom loop with known gradients, and two optimizers for one weight."""

    def __init__(self, rank: int) -> None:
        import keras
        import tensorflow as tf

        from gradring.tensorflow import CustomCollectiveStrategy

        strategy = CustomCollectiveStrategy(update=OUTER)
        with strategy.scope():
            self.weight = tf.Variable(BEGIN.astype("float32"))
            self.optimizers = [keras.optimizers.SGD(RATE) for _ in range(2)]
            for optimizer in self.optimizers:
                optimizer.build([self.weight])

        def replica_step(optimizer: Any) -> None:
            # As of a loss that is divided by the number of replicas.
            gradient = tf.constant([1.0, rank - 2.0]) / strategy.num_replicas_in_sync
            optimizer.apply_gradients([(gradient, self.weight)])

        self.steps = [
            tf.function(lambda it=it: strategy.run(replica_step, args=(it,)))
            for it in self.optimizers
        ]

    def train(self, steps: int, optimizer: int = 0) -> None:
        for _ in range(steps):
            self.steps[optimizer]()


def loaded(rank: int, way: str, directory: str) -> Any:
    """Three steps, weights from elsewhere, and five steps; then the next round is ended."""
    import tensorflow as tf

    from gradring.tensorflow import sync_replicas

    loop = Loop(rank)
    loop.train(3)
    if way == "checkpoint":
        kept = tf.train.Checkpoint(weight=tf.Variable(LOADED.astype("float32")))
        path = kept.write(f"{directory}/rank-{rank}")
        tf.train.Checkpoint(weight=loop.weight).read(path)
    elif way == "one rank, and back":
        if rank == 0:
            before = loop.weight.numpy()
            loop.weight.assign(LOADED)
            loop.weight.assign(before)
    else:
        by_rank = 2.0 * rank - 1 if way == "each rank its own" else 0.0
        loop.weight.assign(LOADED + by_rank)
    loop.train(EVERY)
    sync_replicas(tf.train.Checkpoint(weight=loop.weight))
    return loop.weight.numpy()


def two_optimizers(rank: int) -> Any:
    """Three steps of one optimizer, a round and a step of the other, then two of the first."""
    import tensorflow as tf

    from gradring.tensorflow import sync_replicas

    loop = Loop(rank)
    loop.train(1, 1)  # traced before the other one
    sync_replicas(tf.train.Checkpoint(weight=loop.weight))
    loop.weight.assign(BEGIN)
    loop.train(3)
    loop.train(EVERY + 1, 1)
    loop.train(2)
    sync_replicas(tf.train.Checkpoint(weight=loop.weight))
    return loop.weight.numpy()


def kept(rule: updates.Rule, way: str, path: str) -> float:
    """Trains, loads the first weights, and returns how far gradients of zero move them."""
    import keras
    import tensorflow as tf

    from gradring.tensorflow import CustomCollectiveStrategy

    rng = np.random.default_rng(0)
    x, zero = rng.normal(size=(64, 32)).astype("float32"), np.zeros((32, 32), "float32")
    with CustomCollectiveStrategy(update=rule).scope():
        layer = keras.layers.Dense(16, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((32,)), layer])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        checkpoint = tf.train.Checkpoint(model=model)
    model.save_weights(f"{path}.weights.h5")
    written = checkpoint.write(path)
    model.fit(x, 2 * x[:, :16], batch_size=8, steps_per_epoch=6, verbose=0)
    if way == "load_weights":
        model.load_weights(f"{path}.weights.h5")
    else:
        checkpoint.restore(written)
    model.fit(zero, zero[:, :16], batch_size=8, verbose=0)
    return float(np.abs(model.get_weights()[0]).sum())


def job(directory: str) -> dict[str, Any]:
    with join() as comm:
        scenarios: dict[str, Callable[[], Any]] = {
            way: functools.partial(loaded, comm.rank, way, directory) for way in WAYS
        }
        scenarios["two"] = lambda: two_optimizers(comm.rank)
        paths = (f"{directory}/kept-{comm.rank}-{number}" for number in itertools.count())
        scenarios |= {
            f"{name}, {way}": functools.partial(kept, rule, way, next(paths))
            for name, rule in KEEPING.items()
            for way in ("load_weights", "restore")
        }
        return {name: scenario() for name, scenario in scenarios.items()}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory: Path = tmp_path_factory.mktemp("loaded")
    return run_ranks(job, 2, str(directory), timeout=300)


@pytest.mark.parametrize("way", WAYS)
def test_a_round_with_assigned_weights_ends_with_their_mean(ranks: Any, way: str) -> None:
    """It has two more steps; the next one is ended after three, by an outer step."""
    first = BEGIN - RATE * 3 * MEAN if way == "one rank, and back" else LOADED
    expected = first - RATE * (2 + OUTER_RATE * 3) * MEAN
    for rank in ranks:
        np.testing.assert_allclose(rank[way], expected, rtol=1e-6)


def test_rounds_of_two_optimizers_of_one_weight_end_each_other(ranks: Any) -> None:
    """A round that the other optimizer ends is averaged without an outer step."""
    steps = 3 + OUTER_RATE * EVERY + 1 + OUTER_RATE * 2
    for rank in ranks:
        np.testing.assert_allclose(rank["two"], BEGIN - RATE * steps * MEAN, rtol=1e-6)


@pytest.mark.parametrize("way", ["load_weights", "restore"])
@pytest.mark.parametrize("rule", KEEPING)
def test_gradients_kept_from_before_do_not_move_loaded_weights(
    ranks: Any, rule: str, way: str
) -> None:
    assert [rank[f"{rule}, {way}"] for rank in ranks] == [0.0, 0.0]
