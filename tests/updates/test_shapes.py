"""Servers keep variables of every shape: scalars, and such with a dimension of zero."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gradring
from gradring import updates
from gradring.testing import run_ranks
from support.chosen import chosen, marked
from support.keras_models import needs_fit
from support.served import served

pytestmark = needs_fit

SHAPES = ((), (1,), (0,), (0, 3), (3, 0), (2, 0, 4), (5, 3))
#: Functions as users have them, without all that `fit` does besides.
QUICK = ("in a graph",)
STEPS, BATCH, FEATURES = 6, 16, 4
RULES = {
    "synchronous": updates.ParameterServer(),
    "asynchronous": updates.ParameterServer(staleness=None),
}


def job(ways: list[str]) -> dict[str, Any]:
    with gradring.init(reproducible=True) as comm:
        from gradring.tensorflow import CustomCollectiveStrategy

        reduced = CustomCollectiveStrategy(communicator=comm)
        found: dict[str, Any] = {"all-reduce": {way: WAYS[way](reduced) for way in ways}}
        for name, rule in RULES.items():
            found[name] = {}
            for way in ways:
                with served(comm, rule, servers=2) as strategy:
                    found[name][way] = WAYS[way](strategy)
        return found


def variables_of(strategy: Any) -> list[Any]:
    import tensorflow as tf

    with strategy.scope():
        return [tf.Variable(tf.ones(shape), name=f"v{i}") for i, shape in enumerate(SHAPES)]


def trained(strategy: Any, function: Any) -> list[np.ndarray[Any, Any]]:
    """All shapes at once."""
    import keras
    import tensorflow as tf

    variables = variables_of(strategy)
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.125, momentum=0.5)

    def replica_step() -> None:
        with tf.GradientTape() as tape:
            losses = [tf.reduce_sum(tf.square(each - 2)) for each in variables]
            loss = tf.add_n(losses) / strategy.num_replicas_in_sync
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    step = function(lambda: strategy.run(replica_step))
    for _ in range(STEPS):
        step()
    return [variable.numpy() for variable in variables]


def eagerly(strategy: Any) -> Any:
    return trained(strategy, lambda step: step)


def in_a_graph(strategy: Any) -> Any:
    import tensorflow as tf

    return trained(strategy, tf.function)


def by_fit(strategy: Any) -> Any:
    import keras

    class Scaled(keras.layers.Layer):  # type: ignore[misc]
        def build(self, shape: Any) -> None:
            self.gain = self.add_weight(shape=(), initializer="ones", name="gain")
            self.none = self.add_weight(shape=(0, shape[-1]), name="none")

        def call(self, inputs: Any) -> Any:
            return inputs * self.gain + keras.ops.sum(self.none)

    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [keras.layers.Input((FEATURES,)), keras.layers.Dense(3), Scaled()]
        model = keras.Sequential([*layers, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse")
    x = np.random.default_rng(0).normal(size=(STEPS * BATCH, FEATURES)).astype(np.float32)
    model.fit(x, x[:, :1], batch_size=BATCH, shuffle=False, verbose=0)
    return [np.asarray(weight) for weight in model.get_weights()]


WAYS = {"eagerly": eagerly, "in a graph": in_a_graph, "by fit": by_fit}


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Any:
    return run_ranks(job, 2, chosen(request, "way"), timeout=280)


@pytest.mark.parametrize("way", marked(WAYS, QUICK))
def test_synchronous_updates_are_those_of_an_all_reduce(ranks: Any, way: str) -> None:
    expected = ranks[0]["all-reduce"][way]
    assert any(each.shape == () and each != 1 for each in expected), "the scalar has moved"
    for rank in ranks:
        for ours, theirs in zip(rank["synchronous"][way], expected, strict=True):
            assert ours.shape == theirs.shape
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("way", marked(WAYS, QUICK))
def test_asynchronous_updates_move_the_scalar(ranks: Any, way: str) -> None:
    for rank in ranks:
        shapes = [each.shape for each in rank["all-reduce"][way]]
        found = rank["asynchronous"][way]
        assert [each.shape for each in found] == shapes
        assert all(np.isfinite(each).all() for each in found)
        assert any(each.shape == () and each != 1 for each in found)
