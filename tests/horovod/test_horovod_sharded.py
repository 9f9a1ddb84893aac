"""`DistributedOptimizer(update=Sharded())` on two ranks trains as without the option."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from gradring import updates
from gradring.testing import run_ranks
from support.chosen import chosen, marked
from support.keras_models import HAS_MULTI_OPTIMIZER, needs_fit
from support.tf_worker import refusal, take_one_thread

pytestmark = [needs_fit, pytest.mark.timeout(600)]

Found = dict[str, Any]

STEPS, ROWS = 4, 8
SHARDED = updates.Sharded()
#: Optimizers, options of `DistributedOptimizer`, and whether a `LossScaleOptimizer` is around it.
CASES: dict[str, tuple[str, Found, bool]] = {
    "Adam": ("Adam(0.01)", {}, False),
    "eager": ("Adam(0.01)", {}, False),
    "sum": ("SGD(0.01, momentum=0.9)", {"op": "sum"}, False),
    "decay": ("AdamW(0.01, weight_decay=0.1)", {"sparse_as_dense": True}, False),
    "predivided": ("RMSprop(0.01)", {"gradient_predivide_factor": 4.0}, False),
    "loss scale": ("Adam(0.01)", {}, True),
    "clipnorm": ("Adam(0.01, clipnorm=0.01)", {}, False),
    "clipvalue": ("Adam(0.01, clipvalue=0.01)", {}, False),
    "global_clipnorm": ("SGD(0.1, momentum=0.9, global_clipnorm=0.1)", {}, False),
    "averages": ("Adam(0.01, use_ema=True, ema_momentum=0.5)", {}, False),
    "accumulates": ("SGD(0.01, momentum=0.9, gradient_accumulation_steps=2)", {}, False),
    "passes": ("Adam(0.01)", {"backward_passes_per_step": 2}, False),
}
QUICK = ["global_clipnorm"]


def several_of(optimizer: Any) -> Any:
    import keras

    kinds = keras.optimizers
    return kinds.MultiOptimizer(kinds.OptimizerMap(optimizer, {}))


def optimizer_of(text: str, update: updates.Rule, **options: Any) -> Any:
    import keras

    import gradring.horovod.tensorflow.keras as hvd

    if options.get("op") == "sum":
        options["op"] = hvd.Sum
    made = eval(f"keras.optimizers.{text}", {"keras": keras})
    return hvd.DistributedOptimizer(made, update=update, **options)


def make_model(seed: int = 0) -> Any:
    """A model whose table and kernel are divided, and whose biases are not."""
    import keras

    keras.utils.set_random_seed(seed)
    words = keras.Input([4], dtype="int32")
    x = keras.layers.Flatten()(keras.layers.Embedding(300, 8)(words))
    return keras.Model(words, keras.layers.Dense(1)(keras.layers.Dense(96, "tanh")(x)))


def own_samples() -> tuple[Any, Any]:
    import gradring.horovod.tensorflow as hvd

    x = np.random.default_rng(hvd.rank()).integers(0, 300, size=[STEPS * ROWS, 4])
    return x, (x.sum(1, keepdims=True) / 600).astype(np.float32)


def state_of(model: Any, optimizer: Any) -> Found:
    from gradring.tensorflow import sync_replicas

    held = sum(int(np.size(variable.value.numpy())) for variable in optimizer.variables)
    sync_replicas(model)
    found = [variable.numpy() for variable in (*model.variables, *optimizer.variables)]
    return {"held": held, "state": found}


def by_loop(update: updates.Rule, case: str) -> Found:
    import keras
    import tensorflow as tf

    text, options, scales = CASES[case]
    model, distributed = make_model(), optimizer_of(text, update, **options)
    outer = keras.optimizers.LossScaleOptimizer(distributed, 8.0) if scales else distributed

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = outer.scale_loss(tf.reduce_mean((model(x) - y) ** 2))
        gradients = tape.gradient(loss, model.trainable_variables)
        outer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    run, (x, y) = step if case == "eager" else tf.function(step), own_samples()
    for number in range(STEPS):
        rows = slice(number * ROWS, (number + 1) * ROWS)
        run(*map(tf.constant, (x[rows], y[rows])))
    return state_of(model, outer)


def compiled(update: updates.Rule, seed: int = 0) -> Any:
    import keras

    model = make_model(seed)
    # An older file cannot name a loss by its abbreviation.
    model.compile(optimizer_of("Adam(0.01)", update), keras.losses.MeanSquaredError())
    return model


def fit(model: Any, *callbacks: Any, epochs: int = 1) -> Found:
    x, y = own_samples()
    options: Found = {"batch_size": ROWS, "shuffle": False, "verbose": 0}
    model.fit(x, y, epochs=epochs, callbacks=list(callbacks), **options)
    return state_of(model, model.optimizer)


def by_fit(directory: str) -> Found:
    """The usual program: equal weights by a callback, and files of rank 0 alone."""
    import keras

    import gradring.horovod.tensorflow.keras as hvd

    held: list[int] = []

    class Held(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            variables = self.model.optimizer.variables
            held.append(sum(int(np.size(each.value.numpy())) for each in variables))

    plain = compiled(updates.AllReduce())
    expected = fit(plain, epochs=2)
    path = os.path.join(directory, "{0}.keras").format
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), Held()]
    if hvd.rank() == 0:
        callbacks.append(keras.callbacks.ModelCheckpoint(path("epoch-{epoch}")))
    model = compiled(SHARDED, seed=hvd.rank())
    found = fit(model, *callbacks, epochs=2)
    if hvd.rank() == 0:
        model.save(path("end"))
    hvd.allgather_object("saved")
    of_callback = hvd.load_model(path("epoch-2"), update=SHARDED)
    before = living("velocity")
    loaded = hvd.load_model(path("end"), update=SHARDED)
    velocities = living("velocity") - before
    files = [state_of(each, each.optimizer)["state"] for each in (of_callback, loaded)]
    on_one_rank = compiled(SHARDED, seed=1 + hvd.rank())
    if hvd.rank() == 0:
        on_one_rank.optimizer.build(on_one_rank.trainable_variables)
        on_one_rank.load_weights(path("end"))
    return {
        "fit": (expected, found),
        "held": held,
        "files": files,
        "velocities of a variable": velocities / len(loaded.trainable_variables),
        "continued": (fit(plain), fit(loaded), fit(on_one_rank, callbacks[0]), fit(model)),
        "restored": restored(model),
    }


def living(name: str) -> int:
    """Number of variables of Keras in memory with this in their path."""
    import gc

    import keras

    gc.collect()
    known = (it for it in gc.get_objects() if issubclass(type(it), keras.Variable))
    return sum(name in it.path for it in known)


def restored(model: Any) -> Any:
    """An epoch after a commit, and the same epoch after the commit is restored."""
    import gradring.horovod.tensorflow.keras as hvd

    state = hvd.elastic.KerasState(model, batch=0)
    state.commit()
    first = fit(model)
    state.restore()
    return first, fit(model, hvd.elastic.CommitStateCallback(state, 2))


def broadcast() -> Found:
    """Broadcasts of the optimizer's variables in the middle of a training."""
    import tensorflow as tf

    import gradring.horovod.tensorflow as hvd

    def run(look: Any, update: updates.Rule = SHARDED) -> Any:
        weight = tf.Variable(tf.zeros([256]))
        optimizer = optimizer_of("SGD(1.0, momentum=0.5)", update)
        for number in range(3):
            gradient = tf.range(256.0) * (hvd.rank() + 1)
            optimizer.apply_gradients([(gradient, weight)])
            if number == 1:
                look(optimizer)
        return weight.numpy()

    def one_rank_loads(optimizer: Any) -> None:
        momentum = optimizer.momentums[0]
        if hvd.rank() == 1:
            momentum.assign(tf.fill([256], 2.0))
        hvd.broadcast_variables([momentum], root_rank=1)

    def another_rank_loads(update: updates.Rule) -> Any:
        weight = tf.Variable(tf.zeros([256]))
        optimizer = optimizer_of("Adam(0.5)", update)
        optimizer.build([weight])
        moments = [it for it in optimizer.variables if it.shape == (256,)]
        for moment in moments if hvd.rank() == 1 else ():
            moment.assign(tf.fill([256], 2.0))
        hvd.broadcast_variables(optimizer.variables, root_rank=0)
        optimizer.apply_gradients([(tf.range(256.0) * (hvd.rank() + 1), weight)])
        return weight.numpy()

    return {
        "other loaded": another_rank_loads(SHARDED),
        "other loaded, plain": another_rank_loads(updates.AllReduce()),
        "not": run(lambda _: None),
        "plain": run(lambda _: None, updates.AllReduce()),
        "all": run(lambda made: hvd.broadcast_variables(made.variables, root_rank=0)),
        "root 1": run(lambda made: hvd.broadcast_variables(made.momentums, root_rank=1)),
        "in a graph": run(
            lambda made: tf.function(lambda: hvd.broadcast_variables(made.variables, 0))()
        ),
        "loaded": run(one_rank_loads),
        "loaded, plain": run(one_rank_loads, updates.AllReduce()),
    }


def refusals() -> dict[str, str]:
    import keras
    import tensorflow as tf

    import gradring.horovod.tensorflow as hvd
    from gradring.horovod import basics
    from gradring.tensorflow import CustomCollectiveStrategy

    adam, old = keras.optimizers.Adam(), tf.compat.v1.train.GradientDescentOptimizer(0.1)
    weight = tf.Variable(tf.fill([256], float(hvd.rank())), name="weight")
    half = hvd.add_process_set([0, 1])

    def text(optimizer: Any, update: Any = SHARDED, **options: Any) -> str:
        try:
            hvd.DistributedOptimizer(optimizer, update=update, **options)
        except (NotImplementedError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return "accepted"

    def apply(made: Any) -> None:
        made.apply_gradients([(tf.ones([256]), weight)])

    def in_strategy() -> None:
        with CustomCollectiveStrategy(communicator=basics.communicator()).scope():
            optimizer_of("SGD(0.1)", SHARDED).build([tf.Variable(1.0)])

    made = optimizer_of("SGD(0.1, momentum=0.5)", SHARDED)
    unlike = refusal(lambda: apply(made))
    hvd.broadcast_variables([weight], root_rank=1)
    apply(made)
    loaded = optimizer_of("SGD(0.1, momentum=0.5)", SHARDED)
    loaded.build([weight])
    if hvd.rank() == 0:
        loaded.momentums[0].assign(tf.ones([256]))
    in_graph = tf.function(lambda: hvd.broadcast_variables(loaded.momentums, 0))
    return {
        "loaded, in a graph": refusal(in_graph),
        "loaded": refusal(lambda: apply(loaded)),
        "another rule": text(adam, updates.LocalSGD()),
        "arguments": text(adam, updates.Sharded(sync_every=2)),
        "TensorFlow 1": text(old),
        "loss scale": text(keras.optimizers.LossScaleOptimizer(adam)),
        "several": text(several_of(adam)) if HAS_MULTI_OPTIMIZER else "inside of a MultiOptimizer",
        "process set": text(adam, process_set=half),
        "compression": text(adam, compression=hvd.Compression.fp16),
        "local": refusal(lambda: made.register_local_var(weight)),
        "lamb": refusal(lambda: optimizer_of("Lamb(0.1)", SHARDED).build([weight])),
        "strategy": refusal(in_strategy),
        "broadcast": refusal(lambda: hvd.broadcast_variables(made.variables, 0, process_set=half)),
        "unlike": unlike,
        "trained": str(weight.numpy()[0]),
    }


def saved_alone(directory: str) -> str:
    """The error of each rank if rank 0 saves alone while each rank holds its part."""
    import gradring.horovod.tensorflow as hvd

    model = compiled(SHARDED)
    x, y = own_samples()
    model.train_on_batch(x, y)
    path = os.path.join(directory, "alone.keras")
    try:
        if hvd.rank() == 0:
            model.save(path)
        model.train_on_batch(x, y)
    except Exception as error:
        return f"{type(error).__name__}: {error} {os.path.exists(path)}"
    return "none"


def built_in_fit(update: updates.Rule) -> Found:
    """A model without an input layer, whose first batch makes the variables."""
    import keras

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Dense(96, "tanh"), keras.layers.Dense(1)])
    model.compile(optimizer_of("Adam(0.01)", update), "mse")
    return fit(model)


def two_ranks(directory: str, cases: list[str]) -> Found:
    import gradring.horovod.tensorflow as hvd

    take_one_thread()
    hvd.init()
    rules: list[updates.Rule] = [updates.AllReduce(), SHARDED]
    found: Found = {case: [by_loop(rule, case) for rule in rules] for case in cases}
    found |= by_fit(directory)
    found["built in fit"] = [built_in_fit(rule) for rule in rules]
    found["broadcast"] = broadcast()
    found["refused"] = refusals()
    found["alone"] = saved_alone(directory)
    with contextlib.suppress(Exception):
        hvd.shutdown()
    return found


@pytest.fixture(scope="module")
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Found]]:
    directory = str(tmp_path_factory.mktemp("sharded"))
    cases = chosen(request, "case")
    env = {"GRADRING_REPRODUCIBLE": "1"}
    yield run_ranks(two_ranks, 2, directory, cases, env=env, timeout=500)


def assert_equal(first: Found, second: Found, tolerance: float = 0.0) -> None:
    assert [each.shape for each in first["state"]] == [each.shape for each in second["state"]]
    for one, other in zip(first["state"], second["state"], strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", marked(CASES, QUICK))
def test_weights_and_states_are_those_without_the_option(ranks: list[Found], case: str) -> None:
    plain, sharded = ranks[0][case]
    assert_equal(plain, sharded, 2e-6)
    assert_equal(sharded, ranks[1][case][1])


def test_a_model_that_fit_builds_is_trained(ranks: list[Found]) -> None:
    plain, sharded = ranks[0]["built in fit"]
    assert_equal(plain, sharded, 2e-6)
    assert_equal(sharded, ranks[1]["built in fit"][1])


def test_each_rank_holds_half_of_the_state(ranks: list[Found]) -> None:
    whole = ranks[0]["fit"][0]["held"]
    assert sum(rank["held"][0] for rank in ranks) < whole + 10
    for rank in ranks:
        assert len(rank["held"]) > STEPS
        assert max(rank["held"]) < 0.54 * whole


def test_fit_begins_with_the_weights_of_rank_0(ranks: list[Found]) -> None:
    for rank in ranks:
        plain, sharded = rank["fit"]
        assert_equal(plain, sharded)


def test_files_of_rank_0_have_the_whole_state(ranks: list[Found]) -> None:
    for rank in ranks:
        _, found = rank["fit"]
        of_callback, loaded = rank["files"]
        # A loaded model has no metrics yet.
        assert [each.shape for each in loaded] == [each.shape for each in of_callback]
        for one, other in zip(of_callback, loaded, strict=True):
            np.testing.assert_array_equal(one, other)
        plain, *others = rank["continued"]
        assert len(found["state"]) == len(plain["state"])
        for other in others:
            assert_equal(plain, other)


def test_a_loaded_model_has_its_state_once(ranks: list[Found]) -> None:
    assert [rank["velocities of a variable"] for rank in ranks] == [1, 1]


def test_a_broadcast_keeps_the_parts_of_all_ranks(ranks: list[Found]) -> None:
    for rank in ranks:
        found = rank["broadcast"]
        loaded, plain = found.pop("loaded"), found.pop("loaded, plain")
        np.testing.assert_array_equal(loaded, plain)
        loaded, plain = found.pop("other loaded"), found.pop("other loaded, plain")
        np.testing.assert_allclose(loaded, plain, atol=2e-6)
        for weight in found.values():
            np.testing.assert_array_equal(weight, found["not"])


def test_a_state_is_committed_and_restored_whole(ranks: list[Found]) -> None:
    for rank in ranks:
        assert_equal(*rank["restored"])


def test_what_does_not_fit_is_refused(ranks: list[Found]) -> None:
    for rank in ranks:
        found = rank["refused"]
        for case in ("another rule", "arguments"):
            assert "is none of AllReduce() and Sharded()" in found[case]
        assert found["TensorFlow 1"].startswith("NotImplementedError: ")
        assert "needs an optimizer of Keras 3" in found["TensorFlow 1"]
        assert "inside of a LossScaleOptimizer" in found["loss scale"]
        assert "inside of a MultiOptimizer" in found["several"]
        assert "and process_set=" in found["process set"]
        assert "does not take compression=" in found["compression"]
        assert "weight would differ between them" in found["local"]
        assert "Lamb may use more than one element" in found["lamb"]
        assert "outside of strategies" in found["strategy"]
        assert "leave out process_set=" in found["broadcast"]


def test_unequal_weights_are_refused_before_the_first_step(ranks: list[Found]) -> None:
    for rank in ranks:
        assert "begin to train with different weights" in rank["refused"]["unlike"]
        assert "begin to train with different weights" in rank["refused"]["loaded"]
        assert "some ranks have assigned the state" in rank["refused"]["loaded, in a graph"]
        np.testing.assert_allclose(float(rank["refused"]["trained"]), 0.9)


def test_a_rank_that_saves_alone_writes_no_file(ranks: list[Found]) -> None:
    for rank in ranks:
        assert "MismatchError" in rank["alone"], rank["alone"]
        assert rank["alone"].endswith("False")


def lose_one() -> Any:
    """A momentum of two ranks, and of one rank after the loss of the other."""
    import tensorflow as tf

    import gradring.horovod.tensorflow as hvd

    take_one_thread()
    hvd.init()
    model = tf.Module()
    model.weight = tf.Variable(tf.zeros([256]))
    optimizer = optimizer_of("SGD(1.0, momentum=0.5)", SHARDED)
    state = hvd.elastic.State(model, optimizer, step=0)

    @tf.function  # type: ignore[untyped-decorator]
    def step(gradient: Any) -> None:
        optimizer.apply_gradients([(gradient, model.weight)])

    @hvd.elastic.run
    def train(state: Any) -> Any:
        while state.step < 5:
            if state.step == 3 and hvd.size() == 2 and hvd.rank() == 1:
                os._exit(1)
            step(tf.range(256.0) * (hvd.rank() + 1))
            state.step += 1
            state.commit()
        return hvd.size(), model.weight.numpy(), optimizer.momentums[0].numpy()

    return train(state)


def test_a_lost_rank_leaves_the_whole_state() -> None:
    left, _lost = run_ranks(lose_one, 2, check=False)
    size, weight, momentum = left.value
    expected, velocity = 0.0, 0.0
    for step in range(5):
        velocity = 0.5 * velocity - (1.5 if step < 3 else 1.0)
        expected += velocity
    assert size == 1
    np.testing.assert_allclose(weight, expected * np.arange(256.0), rtol=1e-6)
    np.testing.assert_allclose(momentum, velocity * np.arange(256.0), rtol=1e-6)


def refused_by_tf_keras() -> str:
    import tensorflow as tf

    import gradring.horovod.tensorflow.keras as hvd

    with pytest.raises(NotImplementedError) as refused:
        hvd.DistributedOptimizer(tf.keras.optimizers.SGD(), update=SHARDED)
    return str(refused.value)


@pytest.mark.slow
def test_tf_keras_is_refused() -> None:
    pytest.importorskip("tf_keras")
    (said,) = run_ranks(refused_by_tf_keras, 1, env={"TF_USE_LEGACY_KERAS": "1"})
    assert "needs an optimizer of Keras 3" in said
