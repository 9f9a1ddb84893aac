"""`updates.Sharded` on two and three ranks, compared with `AllReduce` and with one process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradring import updates
from gradring.gradients.parts import GRAIN, divide
from gradring.testing import run_ranks
from support.chosen import chosen, marked
from support.keras_models import HAS_MULTI_OPTIMIZER, needs_fit
from support.tf_worker import join, refusal

pytestmark = [needs_fit, pytest.mark.timeout(900)]

SEVERAL = (
    "MultiOptimizer(keras.optimizers.OptimizerMap("
    "keras.optimizers.SGD(0.01, momentum=0.9), {'dense.*': keras.optimizers.Adam(0.01)}))"
)
STEPS = 4
BATCH = 24
#: Optimizers whose updates have the bits of `AllReduce`.
SAME_BITS = {
    **{
        name: f"{name}(0.01)"
        for name in ("RMSprop", "Adam", "Adadelta", "Adagrad", "Adamax", "Nadam", "Ftrl", "Lion")
    },
    "momentum": "SGD(0.01, momentum=0.9, nesterov=True, weight_decay=0.1)",
    "amsgrad": "Adam(0.01, amsgrad=True)",
    "centered": "RMSprop(0.01, momentum=0.5, centered=True)",
    "clipvalue": "Adam(0.01, clipvalue=0.01)",
    "decay": "AdamW(0.01, weight_decay=0.1)",
    "averages": "Adam(0.01, use_ema=True, ema_momentum=0.5)",
    "overwrites": "Adam(0.01, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2)",
    "loss scale": "LossScaleOptimizer(keras.optimizers.Adam(0.01), initial_scale=8.0)",
    **({"several": SEVERAL} if HAS_MULTI_OPTIMIZER else {}),
}
#: Optimizers that add up values of several elements, in another order than `AllReduce`.
ROUNDED = {
    "clipnorm": "Adam(0.01, clipnorm=0.01)",
    "global_clipnorm": "Adam(0.01, global_clipnorm=0.01)",
    "clips sums": "SGD(0.01, clipnorm=0.1)",
    "accumulates": "SGD(0.01, momentum=0.9, gradient_accumulation_steps=2)",
    "accumulates, clips": "Adam(0.01, gradient_accumulation_steps=2, global_clipnorm=0.1)",
}


#: Trainings whose updates have the bits of `AllReduce`, and those in every run of the tests.
EQUAL = [*SAME_BITS, "eager", "few rows", "fit", "fit, averages", "outside", "halves"]
QUICK = ["Adam", "loss scale", "several", "few rows", "fit", "halves"]


def optimizer_of(text: str, excluded: bool = False) -> Any:
    import keras

    made = eval(f"keras.optimizers.{text}", {"keras": keras})
    if excluded:
        made.exclude_from_weight_decay(var_names=["bias"])
    return made


def make_model(rows: int = 300) -> Any:
    """A model with rows, whole kernels, a constraint, and parts of every kind."""
    import keras

    keras.utils.set_random_seed(1)
    words = keras.Input([4], dtype="int32")
    x = keras.layers.Flatten()(keras.layers.Embedding(rows, 8)(words))
    x = keras.layers.Dense(
        200, activation="relu", kernel_constraint=keras.constraints.MaxNorm(0.9)
    )(x)
    x = keras.layers.Reshape([7, 11, 1])(keras.layers.Dense(77)(x))
    x = keras.layers.Flatten()(keras.layers.Conv2D(5, 3)(x))
    return keras.Model(words, keras.layers.Dense(1)(x))


def samples() -> tuple[Any, Any]:
    draw = np.random.default_rng(0)
    x = draw.integers(0, 300, size=[STEPS * BATCH, 4])
    return x, (x.sum(1, keepdims=True) / 100).astype(np.float32)


def dataset() -> Any:
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(samples()).batch(BATCH)


def strategy_of(comm: Any, rule: updates.Rule) -> Any:
    from gradring.tensorflow import CustomCollectiveStrategy

    return CustomCollectiveStrategy(communicator=comm, update=rule)


def elements(optimizer: Any) -> int:
    """Numbers that this rank holds of an optimizer's state."""
    held = [variable.value for variable in optimizer.variables]
    return sum(int(np.size(variable.numpy())) for variable in held)


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    import tensorflow as tf

    from gradring.tensorflow import check_replicas

    held = elements(optimizer)
    check_replicas(tf.train.Checkpoint(model=model, optimizer=optimizer))
    weights = [variable.numpy() for variable in model.variables]
    state = [
        variable.numpy()
        for variable in optimizer.variables
        if not variable.path.endswith("_gradient_accumulator")
    ]
    return {"weights": weights, "state": state, "held": held}


def by_loop(
    comm: Any, rule: updates.Rule, text: str, eager: bool = False, rows: int = 300
) -> dict[str, Any]:
    """Trains by a custom loop."""
    import tensorflow as tf

    strategy = strategy_of(comm, rule)
    with strategy.scope():
        model, optimizer = make_model(rows), optimizer_of(text, excluded=text.startswith("AdamW"))

    def replica_step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((model(x) - y) ** 2) / BATCH
            loss = optimizer.scale_loss(loss)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    def step(x: Any, y: Any) -> None:
        strategy.run(replica_step, args=(x, y))

    run = step if eager else tf.function(step)
    x, y = samples()
    for number in range(STEPS):
        own = slice(number * BATCH + comm.rank, (number + 1) * BATCH, comm.world_size)
        run(tf.constant(x[own] % rows), tf.constant(y[own]))
    return state_of(model, optimizer)


def compiled(comm: Any, rule: updates.Rule, text: str = "Adam(0.01)") -> tuple[Any, Any]:
    strategy = strategy_of(comm, rule)
    with strategy.scope():
        model = make_model()
        model.compile(optimizer_of(text), "mse", metrics=["mae"])
    return strategy, model


def by_fit(comm: Any, rule: updates.Rule, text: str, swaps: bool = False) -> dict[str, Any]:
    import keras

    _, model = compiled(comm, rule, text)
    swap = keras.callbacks.SwapEMAWeights
    for callbacks in [[swap(swap_on_epoch=True)], [swap()]] if swaps else [[]]:
        history = model.fit(
            dataset(), epochs=2, verbose=0, callbacks=callbacks, validation_data=dataset()
        )
    return {**state_of(model, model.optimizer), "logs": history.history}


def both(run: Callable[..., Any], *args: Any, **options: Any) -> Any:
    comm, *rest = args
    return [run(comm, rule, *rest, **options) for rule in (updates.AllReduce(), updates.Sharded())]


def compared(comm: Any) -> dict[str, Callable[[], Any]]:
    """The trainings by `AllReduce` and by `Sharded`."""

    def sums() -> list[Any]:
        return [
            by_loop(comm, rule(sync_every=2), "Adam(0.01, clipnorm=0.1)")
            for rule in (updates.AllReduce, updates.Sharded)
        ]

    return {
        **{
            name: lambda text=text: both(by_loop, comm, text)  # type: ignore[misc]
            for name, text in (SAME_BITS | ROUNDED).items()
        },
        "eager": lambda: both(by_loop, comm, "Adam(0.01)", eager=True),
        "few rows": lambda: both(by_loop, comm, "Adam(0.01)", rows=20),
        "fit": lambda: both(by_fit, comm, "Adam(0.01)"),
        "fit, averages": lambda: both(by_fit, comm, SAME_BITS["averages"], swaps=True),
        "outside": lambda: both(made_outside, comm),
        "halves": lambda: both(by_halves, comm),
        "sums": sums,
    }


def two_ranks(directory: str, names: list[str]) -> dict[str, Any]:
    with join(reproducible=True) as comm:
        found = {name: run() for name, run in compared(comm).items() if name in {*names, "Adam"}}
        found["norms"] = [norms(comm, rule) for rule in (updates.AllReduce(), updates.Sharded())]
        found["files"] = files(comm, directory)
        found["refused"] = refusals(comm)
        found["places"] = another_place(comm)
        found["shapes"] = shapes_of_parts(comm)
        found["looked at"] = looked_at(comm)
        found["backup"] = both(from_a_backup, comm, directory)
        found["misused"] = misused(comm)
        return found


def norms(comm: Any, rule: updates.Rule) -> list[float]:
    """Norms of gradients as a monitor of `fit` shows them."""
    from gradring.tensorflow.keras import gradient_norm

    _, model = compiled(comm, rule, "SGD(0.01)")
    watched = gradient_norm.watch(model)
    model.fit(dataset().take(1), verbose=0)
    return [float(watched.reduced.numpy()), float(watched.own.numpy())]


def files(comm: Any, directory: str) -> dict[str, Any]:
    """Saves in all ways, with the state in parts."""
    import keras
    import tensorflow as tf

    from gradring.tensorflow import save

    held: dict[str, int] = {}
    _, model = compiled(comm, updates.Sharded())
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)

    class Held(keras.callbacks.EarlyStopping):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            held[f"batch {batch}"] = elements(self.model.optimizer)

    path = os.path.join(directory, "of_{0}.keras").format
    model.fit(
        dataset(),
        verbose=0,
        callbacks=[
            Held("loss"),
            keras.callbacks.ModelCheckpoint(path("epochs")),
            keras.callbacks.ModelCheckpoint(path("batches"), save_freq=3),
            keras.callbacks.BackupAndRestore(
                os.path.join(directory, "backup"), save_freq=3, delete_checkpoint=False
            ),
        ],
    )
    if comm.rank == 0:
        model.save(path("the_chief_alone"))
    model.fit(dataset().take(1), verbose=0, callbacks=[])
    model.optimizer.learning_rate = 0.0
    model.train_on_batch(*next(iter(dataset())))
    held["after a batch"] = elements(model.optimizer)
    checkpoint.write(os.path.join(directory, f"direct-{comm.rank}"))
    model.save(path(f"rank_{comm.rank}"))
    save(checkpoint, os.path.join(directory, "saved"))
    model.summary(print_fn=lambda *_, **__: None)
    return {**state_of(model, model.optimizer), "in fit": held}


def refusals(comm: Any) -> dict[str, str]:
    import keras
    import tensorflow as tf

    class Own(keras.optimizers.SGD):  # type: ignore[misc]
        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            self.assign_sub(variable, tf.cast(learning_rate, variable.dtype) * gradient)

    class Renaming(keras.optimizers.AdamW):  # type: ignore[misc]
        """Knows variables by other names, as another version of Keras might."""

        def _var_key(self, variable: Any) -> str:
            return str(variable._unique_id)

    strategy = strategy_of(comm, updates.Sharded())
    with strategy.scope():
        weight = tf.Variable(tf.zeros([4]))

        def build(optimizer: Any) -> str:
            return refusal(lambda: optimizer.build([weight]))

        def apply(optimizer: Any) -> str:
            optimizer.exclude_from_weight_decay([weight])
            optimizer.build([weight])
            pairs = [(tf.ones([4]), weight)]
            return refusal(lambda: strategy.run(lambda: optimizer.apply_gradients(pairs)))

        return {
            "renaming": apply(Renaming(0.1)),
            "lamb": build(keras.optimizers.Lamb(0.1)),
            "adafactor": build(keras.optimizers.Adafactor(0.1)),
            "own": build(Own(0.1)),
        }


def shapes_of_parts(comm: Any) -> list[bool]:
    """Whole states and parts of variables of all kinds, cut eagerly and in a graph."""
    import tensorflow as tf

    shapes = [(), (5,), (1,), (3, 3, 8, 8), (400, 3), (0, 7), (64,), (17, 2), (200,), (2, 2)]
    strategy = strategy_of(comm, updates.Sharded())
    with strategy.scope():
        optimizer = optimizer_of("Adam(0.01, use_ema=True)")
        optimizer.build([tf.Variable(tf.ones(shape)) for shape in shapes])
    (parts,) = strategy.extended.updates._parts.values()
    own = [parts.division(state._position).part_shape(comm.rank) for state in parts.states]
    found = []
    graph = tf.function(parts.cut)
    both_ways = tf.function(lambda: (parts.cut(), parts.make_whole(), parts.cut())[0])
    for cut in (parts.cut, graph, graph, both_ways):
        wholes = [np.arange(np.prod(state.shape), dtype=np.float32) for state in parts.states]
        for state, whole in zip(parts.states, wholes, strict=True):
            state.assign(whole.reshape(state.shape))
        cut()
        for state, whole, shape in zip(parts.states, wholes, own, strict=True):
            division = parts.division(state._position)
            before = sum(division.count(rank) for rank in range(comm.rank))
            expected = whole[before : before + division.count(comm.rank)].reshape(shape)
            found.append(np.array_equal(state.read_value().numpy(), expected))
        parts.make_whole()
        for state, whole in zip(parts.states, wholes, strict=True):
            found.append(np.array_equal(state.numpy(), whole.reshape(state.shape)))
    return found


def looked_at(comm: Any) -> dict[str, Any]:
    """The momentum in the middle of a training, as others see it."""
    import tensorflow as tf

    from gradring.tensorflow import broadcast_variables, sync_replicas

    def run(look: Callable[[Any, Any], object]) -> Any:
        strategy = strategy_of(comm, updates.Sharded())
        with strategy.scope():
            weight, optimizer = tf.Variable(tf.zeros([128])), optimizer_of("SGD(1.0, momentum=0.5)")
        gradient = tf.range(128.0)

        def step() -> None:
            strategy.run(lambda: optimizer.apply_gradients([(gradient, weight)]))

        step()
        look(weight, optimizer)
        look(weight, optimizer)
        step()
        sync_replicas(tf.train.Checkpoint(optimizer=optimizer, weight=weight))
        return optimizer.momentums[0].numpy(), weight.numpy()

    def in_a_graph(weight: Any, optimizer: Any) -> None:
        tf.function(lambda: sync_replicas(tf.train.Checkpoint(optimizer=optimizer)))()

    return {
        "not": run(lambda *_: None),
        "broadcast": run(lambda _, optimizer: broadcast_variables(optimizer.variables)),
        "broadcast momenta": run(lambda _, optimizer: broadcast_variables(optimizer.momentums)),
        "in a graph": run(in_a_graph),
    }


def from_a_backup(comm: Any, rule: updates.Rule, directory: str) -> Any:
    """Resumes from a backup within an epoch, with the state in parts."""
    import keras

    path = os.path.join(directory, f"resumed by {type(rule).__name__}")
    for _ in range(2):
        _, model = compiled(comm, rule)
        backup = keras.callbacks.BackupAndRestore(path, save_freq=3, delete_checkpoint=False)
        model.fit(dataset(), epochs=2, verbose=0, callbacks=[backup], validation_data=dataset())
    model.save(os.path.join(directory, f"older-{comm.rank}.h5"))
    return state_of(model, model.optimizer)


def made_outside(comm: Any, rule: updates.Rule) -> Any:
    """An optimizer around another one, both made outside of the scope."""
    optimizer = optimizer_of("LossScaleOptimizer(keras.optimizers.SGD(0.01, momentum=0.5))")
    strategy = strategy_of(comm, rule)
    with strategy.scope():
        model = make_model()
        model.compile(optimizer, "mse")
    model.fit(dataset(), verbose=0)
    return state_of(model, model.optimizer)


def by_halves(comm: Any, rule: updates.Rule) -> Any:
    """float16 variables with clipping; averages that overwrite within a round."""
    import tensorflow as tf

    strategy = strategy_of(comm, rule)
    with strategy.scope():
        weight = tf.Variable(tf.zeros([256], tf.float16))
        clipped = optimizer_of("SGD(0.5, global_clipnorm=1.0)")
        averaged = tf.Variable(tf.zeros([256]))
        averaging = optimizer_of(
            "SGD(1.0, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2, "
            "gradient_accumulation_steps=2)"
        )
    gradient = tf.range(256.0) / 256

    def replica_step() -> None:
        clipped.apply_gradients([(tf.cast(gradient, tf.float16), weight)])
        averaging.apply_gradients([(gradient, averaged)])

    seen = []
    for _ in range(7):
        strategy.run(replica_step)
        seen.append(averaged.numpy())
    return {"weights": [weight.numpy(), *seen], "state": []}


def misused(comm: Any) -> dict[str, str]:
    import tensorflow as tf

    from gradring.tensorflow import sync_replicas

    strategy = strategy_of(comm, updates.Sharded())
    with strategy.scope():
        weight, other = tf.Variable(tf.zeros([64])), tf.Variable(tf.zeros([64]))
        optimizer = optimizer_of("SGD(1.0, momentum=0.5)")
        optimizer.build([weight])
    one = tf.ones([64])

    def apply(*pairs: Any) -> None:
        strategy.run(lambda: optimizer.apply_gradients(pairs))

    apply((one, weight))
    unknown = refusal(lambda: apply((one, other)))
    twice = refusal(lambda: apply((one, weight), (one, weight)))
    if comm.rank == 0:
        optimizer.momentums[0].assign(one)
    checkpoint = tf.train.Checkpoint(optimizer=optimizer)
    return {"unknown": unknown, "twice": twice, "alone": refusal(lambda: sync_replicas(checkpoint))}


def another_place(comm: Any) -> dict[str, Any]:
    """A step after the group has formed again, with the state as it was divided before."""
    import tensorflow as tf

    strategy = strategy_of(comm, updates.Sharded())
    with strategy.scope():
        weight, optimizer = tf.Variable(tf.zeros([64])), optimizer_of("SGD(1.0, momentum=0.5)")

    def step() -> None:
        strategy.run(lambda: optimizer.apply_gradients([(tf.ones([64]), weight)]))

    step()
    (parts,) = strategy.extended.updates._parts.values()
    parts._cut_for.assign((7, 9))
    found = {"in parts": refusal(step)}
    optimizer.momentums[0].assign(tf.fill([64], -2.0))
    step()
    # The second step takes the momentum that was assigned: 0.5 * -2 - 2.
    return {**found, "weight": weight.numpy()}


def restored(directory: str, rule: updates.Rule) -> dict[str, Any]:
    """Restores the files of `two_ranks` in all ways, and trains a step."""
    import keras
    import tensorflow as tf

    from gradring.tensorflow import restore

    with join(reproducible=True) as comm:
        path = os.path.join(directory, "of_{0}.keras").format

        def checkpoint(model: Any) -> Any:
            return tf.train.Checkpoint(model=model, optimizer=model.optimizer)

        def read(model: Any) -> None:
            checkpoint(model).read(os.path.join(directory, "direct-1")).assert_consumed()

        ways: dict[str, Callable[[Any], object]] = {
            "weights": lambda model: model.load_weights(path("rank_0")),
            "read": read,
            "restore": lambda model: restore(model, path("rank_1")),
            "restore saved": lambda model: restore(
                checkpoint(model), os.path.join(directory, "saved")
            ),
        }
        found = {}
        for name, load in ways.items():
            strategy, model = compiled(comm, rule)
            model.fit(dataset().take(1), verbose=0)
            load(model)
            found[name] = after_a_step(comm, model)
        strategy, model = compiled(comm, rule)
        checkpoint(model).read(os.path.join(directory, "direct-0"))
        found["before it is built"] = after_a_step(comm, model)
        for name in ("rank_0", "the_chief_alone", "epochs", "batches"):
            with strategy.scope():
                model = keras.models.load_model(path(name))
            found[f"load {name}"] = after_a_step(comm, model)
        return found


def after_a_step(comm: Any, model: Any) -> Any:
    model.optimizer.learning_rate = 0.01
    model.fit(dataset().take(1), verbose=0)
    return state_of(model, model.optimizer)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield str(tmp_path_factory.mktemp("sharded"))


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, directory: str) -> list[Any]:
    return run_ranks(two_ranks, 2, directory, chosen(request, "name"), timeout=800)


def assert_equal(first: Any, second: Any, tolerance: float = 0.0) -> None:
    for kind in ("weights", "state"):
        assert [it.shape for it in first[kind]] == [it.shape for it in second[kind]]
        for one, other in zip(first[kind], second[kind], strict=True):
            np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


def test_all_parts_of_a_bucket_are_of_about_equal_size() -> None:
    shapes = [(), (5,), (3, 3, 64, 64), (1000, 30), (0, 7), (64,)]
    for world_size in (1, 2, 3, 7, 64):
        divisions = divide(shapes, world_size)
        counts = [sum(each.count(rank) for each in divisions) for rank in range(world_size)]
        total = sum(int(np.prod(shape)) for shape in shapes)
        assert sum(counts) == total
        assert max(counts) - total / world_size <= GRAIN * 30
        for shape, each in zip(shapes, divisions, strict=True):
            assert each.bounds[0] == 0
            assert list(each.bounds) == sorted(each.bounds)
            assert each.bounds[-1] * each.unit == np.prod(shape)
            for rank in range(world_size):
                assert np.prod(each.part_shape(rank)) == each.count(rank)


def test_the_parts_of_a_bucket_follow_one_another() -> None:
    draw = np.random.default_rng(0)
    buckets: list[list[tuple[int, ...]]] = [[(40,), (7, 3), (900, 4)], [(993, 30), (29900,)]]
    for _ in range(2000):
        rows, width = draw.integers(1, 1200, size=2)
        buckets.append([(int(rows), int(width) % 40), (int(draw.integers(1, 40000)),), (5,)])
    for shapes in buckets:
        for world_size in (2, 3, 5):
            divisions = divide(shapes, world_size)
            for rank in range(world_size):
                has_ended = False
                # Ranks up to this one own the first elements, and none behind others' elements.
                for each in divisions:
                    until = each.bounds[rank + 1]
                    assert not (has_ended and until)
                    has_ended = has_ended or until < each.bounds[-1]


@pytest.mark.parametrize("name", marked(EQUAL, QUICK))
def test_updates_have_the_bits_of_all_reduce(ranks: list[Any], name: str) -> None:
    plain, sharded = ranks[0][name]
    assert_equal(plain, sharded)
    assert_equal(sharded, ranks[1][name][1])
    assert plain.get("logs") == sharded.get("logs")


@pytest.mark.parametrize("name", marked([*ROUNDED, "sums"], ["global_clipnorm", "sums"]))
def test_norms_and_sums_are_those_of_whole_gradients(ranks: list[Any], name: str) -> None:
    plain, sharded = ranks[0][name]
    assert_equal(plain, sharded, 2e-5)
    assert_equal(sharded, ranks[1][name][1])


def test_each_rank_holds_half_of_the_state(ranks: list[Any]) -> None:
    others = {"momentum", "averages", "accumulates", "several"}
    for name in ("Adam", *(others & ranks[0].keys())):
        whole = ranks[0][name][0]["held"]
        parts = [rank[name][1]["held"] for rank in ranks]
        assert max(parts) < 0.54 * whole
        assert sum(parts) < whole + 10


def test_parts_have_their_values_however_they_are_cut(ranks: list[Any]) -> None:
    for rank in ranks:
        assert len(rank["shapes"]) > 100
        assert all(rank["shapes"])


@pytest.mark.parametrize("look", ["broadcast", "broadcast momenta", "in a graph"])
def test_who_looks_at_the_state_changes_nothing(ranks: list[Any], look: str) -> None:
    for rank in ranks:
        for found, expected in zip(rank["looked at"][look], rank["looked at"]["not"], strict=True):
            np.testing.assert_array_equal(found, expected)


def test_a_backup_has_the_whole_state(ranks: list[Any]) -> None:
    for rank in ranks:
        plain, sharded = rank["backup"]
        assert_equal(plain, sharded)


def test_an_older_file_has_the_whole_state(ranks: list[Any], directory: str) -> None:
    import h5py  # type: ignore[import-untyped]

    shapes: list[Any] = []

    def note(_: str, item: Any) -> None:
        shapes.append(getattr(item, "shape", None))

    for rank in range(2):
        with h5py.File(os.path.join(directory, f"older-{rank}.h5")) as file:
            file["optimizer_weights"].visititems(note)
    # Two moments on each rank.
    assert shapes.count((200, 77)) == 4


def test_misuse_is_refused(ranks: list[Any]) -> None:
    for rank in ranks:
        assert "was not built for the variable" in rank["misused"]["unknown"]
        assert "gets two gradients of" in rank["misused"]["twice"]
        assert "some ranks have assigned the state" in rank["misused"]["alone"]


def test_a_monitor_shows_the_norm_of_whole_gradients(ranks: list[Any]) -> None:
    for rank in ranks:
        plain, sharded = rank["norms"]
        np.testing.assert_allclose(plain, sharded, rtol=1e-5)


def test_the_state_is_in_parts_in_fit_and_after_files(ranks: list[Any]) -> None:
    for rank in ranks:
        whole = rank["Adam"][0]["held"]
        held = rank["files"]["in fit"]
        assert len(held) > STEPS
        assert all(0.4 * whole < count < 0.6 * whole for count in held.values()), held


def test_other_optimizers_are_refused(ranks: list[Any]) -> None:
    for rank in ranks:
        for name, kind in (("lamb", "Lamb"), ("adafactor", "Adafactor"), ("own", "Own")):
            assert rank["refused"][name].startswith("ConfigError: update=Sharded() on rank")
            assert f": {kind} may use" in rank["refused"][name]
        assert "would apply weight decay to a part of" in rank["refused"]["renaming"]


def test_parts_of_a_former_group_are_refused(ranks: list[Any]) -> None:
    for rank in ranks:
        assert "is divided as in the former one; restore it" in rank["places"]["in parts"]
        np.testing.assert_array_equal(rank["places"]["weight"], np.full([64], -5.0, np.float32))


@pytest.mark.parametrize("world_size", marked([1, 3], []))
def test_files_are_restored_by_other_numbers_of_ranks(
    ranks: list[Any], directory: str, world_size: int
) -> None:
    expected = run_ranks(restored, 1, directory, updates.AllReduce(), timeout=300)[0]
    found = run_ranks(restored, world_size, directory, updates.Sharded(), timeout=300)
    of_the_end = [name for name in expected if name not in EARLIER]
    for rank in found:
        for name in expected:
            assert_equal(expected[name], rank[name], 2e-6)
    for name in of_the_end:
        assert_equal(expected[name], expected["weights"])


def test_an_elastic_job_divides_the_state_anew(tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    program = [sys.executable, Path(__file__).with_name("sharded_job.py"), killed]
    launch = [sys.executable, "-m", "gradring", "run", "-np", "3", "--min-np", "2", "--"]

    def sums(command: list[Any]) -> list[Any]:
        env = {name: value for name, value in os.environ.items() if "GRADRING" not in name}
        output = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=240, check=True
        ).stdout
        ends = [line.partition("END ")[2] for line in output.splitlines() if "END " in line]
        return [np.array(end.split(), float) for end in ends]

    (alone,) = sums(program)
    ends = sums([*launch, *program])
    assert killed.exists()
    assert len(ends) >= 2
    for end in ends:
        np.testing.assert_allclose(end, alone, rtol=1e-4)


#: Files from before the end of the training.
EARLIER = ("load the_chief_alone", "load epochs", "load batches")
