"""Each rank draws its own masks, from a state that all have in common."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gradring.testing import run_ranks
from support.keras_models import needs_fit
from support.tf_worker import join

#: Enough for masks that are drawn apart to differ.
SIZE = 64


def make_model() -> Any:
    """The gradient of its weight is the mask of its dropout."""
    import keras

    return keras.Sequential(
        [keras.layers.Input((SIZE,)), scaled(), keras.layers.Dropout(0.5, seed=5)]
    )


def scaled() -> Any:
    import keras

    class Layer(keras.layers.Layer):  # type: ignore[misc]
        def build(self, shape: Any) -> None:
            self.weight = self.add_weight(shape=(SIZE,), initializer="ones")

        def call(self, x: Any) -> Any:
            return x * self.weight

    return Layer()


def loss_of(_: Any, y: Any) -> Any:
    import keras

    return keras.ops.sum(y, axis=-1)


def draw() -> dict[str, Any]:
    """What this rank draws in steps by each door, and what outside of them."""
    import keras
    import tensorflow as tf

    import gradring.horovod.tensorflow as hvd_tensorflow
    import gradring.horovod.tensorflow.keras as hvd
    from gradring.tensorflow import (
        CustomCollectiveStrategy,
        GradientReducer,
        broadcast_variables,
        check_replicas,
    )

    drawn: dict[str, Any] = {}
    with join() as comm:
        generators = [keras.random.SeedGenerator(7) for _ in range(2)]
        drawn["one process"] = keras.random.uniform([4], seed=generators[0]).numpy().tolist()
        strategy = CustomCollectiveStrategy(communicator=comm)

        @tf.function  # type: ignore[untyped-decorator]
        def step() -> Any:
            by_state = keras.random.uniform([4], seed=generators[1])
            return by_state, keras.random.uniform([4], seed=3), keras.random.uniform([4])

        by_state, by_number, by_default = strategy.run(step)
        drawn["state"], drawn["number"] = by_state.numpy().tolist(), by_number.numpy().tolist()
        drawn["default"] = by_default.numpy().tolist()
        check_replicas([generator.state for generator in generators])
        drawn["outside"] = keras.random.uniform([4], seed=generators[1]).numpy().tolist()

        x = np.ones((2, SIZE), "f")
        for kind in ("fit", "again"):
            with strategy.scope():
                model = make_model()
                model.compile(keras.optimizers.SGD(1.0), loss_of)
            model.fit(x, x, batch_size=2, epochs=3, verbose=0)
            drawn[kind] = model.get_weights()[0].tolist()
            check_replicas(model)

        model = make_model()
        broadcast_variables(model.variables, communicator=comm)
        reduce_gradients = GradientReducer(communicator=comm)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x[:1], training=True))
        weights = model.trainable_variables
        (gradient,) = reduce_gradients(tape.gradient(loss, weights), weights)
        drawn["reducer"] = gradient.numpy().tolist()
        check_replicas(model, comm)

    hvd.init()
    for kind in ("variables", "callback"):
        model = make_model()
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)), loss_of)
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
        if kind == "variables":
            hvd_tensorflow.broadcast_variables(model.variables, 0)
            callbacks = []
        model.fit(x[:1], x[:1], epochs=1, verbose=0, callbacks=callbacks)
        drawn[kind] = (1.0 - model.get_weights()[0]).tolist()
    hvd.shutdown()
    return drawn


@needs_fit
def test_each_rank_draws_its_own_by_every_door() -> None:
    first, second = run_ranks(draw, 2)
    for kind in ("state", "default"):
        assert first[kind] != second[kind], kind
    assert first["state"] == first["one process"] == second["one process"]
    for kind in ("number", "outside", "fit", "again", "reducer", "variables", "callback"):
        assert first[kind] == second[kind], kind
    # The same seeds give the same bits.
    assert first["fit"] == first["again"]
    for kind in ("reducer", "variables", "callback"):
        # The mean of two masks of 0 and 2: where they were the same, there would be no 1.
        assert set(first[kind]) == {0.0, 1.0, 2.0}, kind


def draw_by_operations() -> dict[str, Any]:
    """What TensorFlow's own operations draw with a seed, in a step and outside."""
    import tensorflow as tf
    import tf_keras

    from gradring.tensorflow import CustomCollectiveStrategy

    drawn: dict[str, Any] = {}
    with join() as comm:
        strategy = CustomCollectiveStrategy(communicator=comm)
        generator = tf.random.Generator.from_seed(7)
        # The seed for all, and then that of one operation.
        for kind, (all_seed, seed) in {"all": (5, None), "one": (None, 5)}.items():

            @tf.function  # type: ignore[untyped-decorator]
            def step(seed: Any = seed) -> Any:
                return tf.random.uniform([4], seed=seed), tf.nn.dropout(tf.ones([SIZE]), 0.5)

            tf.random.set_seed(all_seed)
            drawn[kind] = [value.numpy().tolist() for value in strategy.run(step)]
            tf.random.set_seed(all_seed)
            drawn[f"{kind}, outside"] = tf.random.uniform([4], seed=3).numpy().tolist()
        drawn["generator"] = strategy.run(lambda: generator.uniform([4])).numpy().tolist()
        drawn["state"] = generator.state.numpy().tolist()

        tf_keras.utils.set_random_seed(5)
        with strategy.scope():
            model = tf_keras.Sequential([tf_keras.layers.Dropout(0.5)])
        masked = strategy.run(lambda: model(tf.ones([1, SIZE]), training=True))
        drawn["tf_keras"] = masked.numpy().tolist()
    return drawn


def test_operations_with_a_seed_draw_each_replica_s_own() -> None:
    first, second = run_ranks(draw_by_operations, 2)
    for kind in ("generator", "tf_keras"):
        assert first[kind] != second[kind], kind
    assert first["all"][0] != second["all"][0]
    assert first["all"][1] != second["all"][1]
    assert first["one"][0] != second["one"][0]
    for kind in ("all, outside", "one, outside", "state"):
        assert first[kind] == second[kind], kind


def draw_on_two_devices() -> list[list[float]]:
    import keras
    import tensorflow as tf

    from gradring.tensorflow import CustomCollectiveStrategy

    cpus = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], cpus)
    with join() as comm:
        strategy = CustomCollectiveStrategy(communicator=comm, devices=["CPU:0", "CPU:1"])
        with strategy.scope():
            generator = keras.random.SeedGenerator(7)
        drawn = strategy.run(tf.function(lambda: keras.random.uniform([4], seed=generator)))
        return [value.numpy().tolist() for value in strategy.experimental_local_results(drawn)]


def test_each_of_several_local_devices_draws_its_own() -> None:
    first, second = run_ranks(draw_on_two_devices, 2)
    assert len({tuple(values) for values in first + second}) == 4


def test_a_keras_without_the_name_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    import keras
    import tensorflow as tf

    from gradring.tensorflow.graph import own_draws

    monkeypatch.delattr(keras.random.SeedGenerator, "next")
    monkeypatch.setattr(own_draws, "_installed", set())
    own_draws.install()
    assert tf.distribute.get_strategy().num_replicas_in_sync == 1
