"""Saving and loading under the strategy: on every worker, on the chief only, and by `save`."""

import contextlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gradring.testing import run_ranks
from support.chosen import chosen, marked
from support.tf_worker import join

KINDS = ("model.keras", "model.weights.h5", "saved_model", "checkpoint")
WAYS = ("every worker", "chief only", "chief only in scope", "save", "save in scope")
#: In every run of the tests: each kind, and each way.
QUICK = (
    ("model.keras", "every worker"),
    ("model.weights.h5", "chief only"),
    ("checkpoint", "chief only in scope"),
    ("model.keras", "save"),
    ("saved_model", "save in scope"),
)
Case = tuple[str, str]


def saved_and_loaded(comm: Any, directory: Path, cases: list[Case]) -> Any:
    """For each kind and way: the largest difference that loading made, here on this rank."""
    import keras
    import tensorflow as tf

    from gradring.tensorflow import CustomCollectiveStrategy, save

    strategy = CustomCollectiveStrategy(communicator=comm)
    with strategy.scope():
        model = small_model(comm.rank)
        model.compile("adam", "mse", metrics=["mae"])
    x = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
    strategy.run(lambda: one_step(model, x + comm.rank))
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)

    def write(kind: str, path: Path) -> None:
        if kind == "model.keras":
            model.save(path)
        elif kind == "model.weights.h5":
            model.save_weights(path)
        elif kind == "saved_model":
            model.export(path)
        else:
            checkpoint.write(str(path))

    def save_by(way: str, kind: str, path: Path) -> None:
        if way == "every worker" or (way == "chief only" and comm.rank == 0):
            write(kind, path)
        elif way == "chief only in scope" and comm.rank == 0:
            with strategy.scope():
                write(kind, path)
        elif way == "save":
            save(checkpoint if kind == "checkpoint" else model, path)
        elif way == "save in scope":
            with strategy.scope():
                save(checkpoint if kind == "checkpoint" else model, path)
        comm.barrier()

    def predict(kind: str, path: Path) -> Any:
        if kind == "saved_model":
            serving = tf.saved_model.load(str(path))
            return serving.serve(x)
        with strategy.scope():
            if kind == "model.keras":
                return keras.saving.load_model(path)(x)
            fresh = small_model(comm.rank + 7)
            if kind == "model.weights.h5":
                fresh.load_weights(path)
            else:
                tf.train.Checkpoint(model=fresh).read(str(path)).expect_partial()
            return fresh(x)

    differences = {}
    expected = model(x)
    for kind, way in cases:
        owner = str(comm.rank) if way == "every worker" else "shared"
        place = Path(directory, way, owner)
        place.mkdir(parents=True, exist_ok=True)
        save_by(way, kind, place / kind)
        loaded = predict(kind, place / kind)
        differences[kind, way] = float(tf.reduce_max(tf.abs(loaded - expected)))
        comm.barrier()
    return {"differences": differences, "weights": model.get_weights()}


def one_step(model: Any, x: Any) -> None:
    """Gives the optimizer a state to save."""
    import tensorflow as tf

    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x, training=True) - x[:, :2]) ** 2)
    gradients = tape.gradient(loss, model.trainable_variables)
    model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


def small_model(seed: int) -> Any:
    import keras

    keras.utils.set_random_seed(seed)
    layers = keras.layers
    return keras.Sequential(
        [layers.Input((4,)), layers.Dense(3, "tanh", name="body"), layers.Dense(2, name="head")]
    )


def pair_of_models() -> Any:
    """A model that nobody calls, and an optimizer for each of its two parts, as a GAN has."""
    import keras

    class Pair(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.parts = [keras.layers.Dense(1), keras.layers.Dense(1)]
            self.optimizers = [keras.optimizers.Adam(), keras.optimizers.SGD(momentum=0.5)]
            for part, optimizer in zip(self.parts, self.optimizers, strict=True):
                part.build((None, 2))
                optimizer.build(part.trainable_variables)
            self.built = True

    return Pair()


def saved_and_updated(directory: str, cases: list[Case]) -> Any:
    """Two things in one group, because starting TensorFlow takes longer than either."""
    with join() as comm:
        loaded = saved_and_loaded(comm, Path(directory, "loaded"), cases)
        place = Path(directory, "updated")
        place.mkdir(exist_ok=True)
        comm.barrier()
        return {
            **loaded,
            **save_and_update(comm, place),
            **export(comm, Path(directory, f"exported-{comm.rank}")),
            **restored_and_compared(comm, Path(directory, "restored")),
            **committed(comm, Path(directory, "committed")),
        }


def export(comm: Any, directory: Path) -> Any:
    """A model whose training has collectives in its layers, exported after it."""
    import keras
    import tensorflow as tf

    from gradring.errors import SaveError
    from gradring.tensorflow import CustomCollectiveStrategy, save

    strategy = CustomCollectiveStrategy(communicator=comm)
    layers = keras.layers
    with strategy.scope():
        normalization = layers.BatchNormalization(synchronized=True)
        model = keras.Sequential([layers.Input((4,)), layers.Dense(3), normalization])
        model.compile("adam", "mse")
    x = np.random.default_rng(comm.rank).normal(size=(32, 4)).astype(np.float32)
    model.fit(x, x[:, :3], batch_size=8, verbose=0)
    model.export(str(directory / "export"))
    tf.saved_model.save(model, str(directory / "save"))
    expected = model(np.ones((2, 4), np.float32), training=False).numpy().tolist()

    class Trainer(tf.Module):  # type: ignore[misc]
        @tf.function  # type: ignore[untyped-decorator]
        def train(self, x: Any) -> Any:
            return strategy.run(lambda x: tf.reduce_sum(model(x, training=True)), (x,))

    trainer = Trainer()
    trainer.model = model
    trainer.train(x)
    with pytest.raises((AssertionError, KeyError)) as refused:
        tf.saved_model.save(trainer, str(directory / "trainer"))
    with pytest.raises(SaveError) as not_saved:
        save(trainer, directory.parent / "trainer", communicator=comm)
    return {
        "expected": expected,
        "exported": [str(path) for path in directory.iterdir()],
        "refused": (str(refused.value), str(not_saved.value)),
    }


#: What a process does that has never heard of gradring.
LOAD_ELSEWHERE = """
import json, sys
sys.modules["gradring"] = None
import tensorflow as tf
for path in sys.argv[1:]:
    model = tf.saved_model.load(path)
    (result,) = model.signatures["serving_default"](tf.ones([2, 4])).values()
    print(json.dumps(result.numpy().tolist()))
"""


def save_and_update(comm: Any, directory: Path) -> Any:
    """Failures of `save`, variables that are read by adding up, and partial updates."""
    import tensorflow as tf

    from gradring.errors import SaveError
    from gradring.tensorflow import CustomCollectiveStrategy, broadcast_variables, save

    def refused(model: Any, path: str) -> Any:
        with pytest.raises(SaveError) as raised:
            save(model, Path(directory, path))
        return raised.value.rank, str(raised.value), isinstance(raised.value, OSError)

    strategy = CustomCollectiveStrategy(communicator=comm)
    with strategy.scope():
        counter = tf.Variable(
            0.0,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )
        model, donor = small_model(comm.rank), small_model(comm.rank + 5)
    strategy.run(lambda: counter.assign(comm.rank + 1.0))
    found: dict[str, Any] = {
        "no directory": refused(model, "missing/model.keras"),
        "one rank": refused(OnlyOn(1 - comm.rank), "other.keras"),
    }
    # The group is still usable, and a successor replaces what was there.
    save(donor, Path(directory, "twice"))
    save(model, Path(directory, "twice"))
    save(tf.train.Checkpoint(counter=counter), Path(directory, "counter"))
    restored = tf.Variable(0.0)
    tf.train.Checkpoint(counter=restored).read(str(Path(directory, "counter")))
    found["counter"] = float(restored)
    serving, one = tf.saved_model.load(str(Path(directory, "twice"))), tf.ones([1, 4])
    # A graph fuses what calls one by one do not.
    is_like = [np.allclose(serving.serve(one), other(one), 1e-5) for other in (model, donor)]
    found["replaced"] = is_like == [True, False]

    # A partial update: the chief restores one layer, every replica receives it.
    save(tf.train.Checkpoint(layer=donor.get_layer("body")), Path(directory, "body"))
    head = model.get_layer("head").get_weights()
    body = model.get_layer("body")
    if comm.rank == 0:
        path = str(Path(directory, "body"))
        tf.train.Checkpoint(layer=body).read(path).assert_consumed()
    broadcast_variables(body.variables)
    found["body"] = same(body.get_weights(), donor.get_layer("body").get_weights())
    found["head"] = same(model.get_layer("head").get_weights(), head)
    return found


def updated_in_fit(model: Any, path: Path, comm: Any) -> Any:
    """One layer comes from a file, another from rank 1, between two steps of `fit`."""
    import keras

    from gradring.tensorflow import broadcast_variables, check_replicas, restore

    head, body = model.get_layer("head"), model.get_layer("body")
    seen: list[Any] = []

    class Update(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch != 1:
                return
            before = head.get_weights()
            restore(model, path, only="*/body/*")
            seen.extend([same(head.get_weights(), before), body.get_weights()])
            if comm.rank == 1:
                head.set_weights([weight + 1 for weight in before])
            broadcast_variables(head.variables, root=1)
            seen.append(same(head.get_weights(), [weight + 1 for weight in before]))

    x = np.random.default_rng(comm.rank).normal(size=(32, 4)).astype(np.float32)
    model.fit(x, x[:, :2], batch_size=8, verbose=0, callbacks=[Update()])
    check_replicas(model.variables, comm)
    kept, restored, sent = seen
    return kept, restored, sent, same(restored, body.get_weights())


class Saved:
    """Two models, a counter and a module; what is saved of them lies where only rank 1 looks."""

    def __init__(self, comm: Any, directory: Path) -> None:
        import tensorflow as tf

        from gradring.tensorflow import CustomCollectiveStrategy, save

        self.comm = comm
        self.strategy = CustomCollectiveStrategy(communicator=comm)
        self.model, self.other = self.trained(1), self.trained(2)
        with self.strategy.scope():
            self.counter = tf.Variable(
                0.0,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )
            self.module = tf.Module()
            self.module.weight = tf.Variable([1.0, 2.0])
        self.count(comm.rank + 1.0)
        # Each rank restores from a path of its own: only that of rank 1 exists.
        self.shared, self.own = directory / "rank-1", directory / f"rank-{comm.rank}"
        if comm.rank == 0:
            self.shared.mkdir(parents=True)
        comm.barrier()
        save(self.model, self.shared / "model.keras")
        save(self.model, self.shared / "model.weights.h5")
        save(self.checkpoint_of(self.model), self.shared / "checkpoint")
        save(self.module, self.shared / "module")
        torn = (self.shared / "model.keras").read_bytes()[:-100]
        (self.shared / "torn.keras").write_bytes(torn)
        comm.barrier()

    def trained(self, seed: int) -> Any:
        from gradring.tensorflow.callbacks import CheckReplicas

        model = self.compiled(seed)
        x = np.random.default_rng(seed + self.comm.rank).normal(size=(32, 4)).astype(np.float32)
        model.fit(x, x[:, :2], batch_size=8, verbose=0, callbacks=[CheckReplicas(every_steps=2)])
        return model

    def compiled(self, seed: int) -> Any:
        import keras

        with self.strategy.scope():
            model = small_model(seed)
            model.compile(keras.optimizers.Adam(0.01), "mse")
        return model

    def count(self, value: float) -> None:
        self.strategy.run(lambda: self.counter.assign(value))

    def checkpoint_of(self, model: Any) -> Any:
        import tensorflow as tf

        return tf.train.Checkpoint(model=model, optimizer=model.optimizer, counter=self.counter)


def state(model: Any) -> Any:
    return [np.array(v) for v in (*model.weights, *model.optimizer.variables)]


def restored_and_compared(comm: Any, directory: Path) -> Any:
    """What `restore` brings back from a file that only rank 1 finds, and `check_replicas` after."""
    saved = Saved(comm, directory)
    return {
        "restored": {
            **restored_of_each_kind(saved),
            "steps of two optimizers": steps_of_two_optimizers(saved),
            "mean over the ranks": mean_over_the_ranks(saved),
            "builds": builds_of_an_optimizer(saved),
            "module": restored_module(saved),
            "while fit trains": updated_in_fit(saved.trained(3), saved.own / "model.keras", comm),
            **restored_layer(saved),
            "one variable": restored_variable(saved),
            **refused_and_kept(saved),
            "differs": differing(saved),
        }
    }


def restored_of_each_kind(saved: Saved) -> dict[str, Any]:
    from gradring.tensorflow import restore

    found: dict[str, Any] = {"fresh": same(state(saved.model), state(saved.other))}
    for kind in ("model.keras", "model.weights.h5", "checkpoint"):
        fresh = saved.compiled(7)
        saved.count(9.0)
        with saved.strategy.scope() if kind == "model.keras" else contextlib.nullcontext():
            whole = saved.checkpoint_of(fresh) if kind == "checkpoint" else fresh
            restore(whole, saved.own / kind)
        found[kind] = same(state(saved.model), state(fresh))
    found["sum over the ranks"] = float(saved.counter.read_value())
    return found


def steps_of_two_optimizers(saved: Saved) -> list[int]:
    from gradring.tensorflow import restore, save

    with saved.strategy.scope():
        pairs = [pair_of_models(), pair_of_models()]
    for optimizer in pairs[0].optimizers:
        optimizer.iterations.assign(5)
    save(pairs[0], saved.shared / "pair.weights.h5")
    saved.comm.barrier()
    restore(pairs[1], saved.own / "pair.weights.h5")
    return [int(each.iterations) for each in pairs[1].optimizers]


def mean_over_the_ranks(saved: Saved) -> float:
    import tensorflow as tf

    from gradring.tensorflow import restore

    with saved.strategy.scope():
        averaged = tf.Variable(
            0.0,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.MEAN,
        )
    restore(ReadsWhatItAssigns(averaged), saved.own / "model.keras")
    return float(averaged.read_value())


def builds_of_an_optimizer(saved: Saved) -> int:
    from gradring.tensorflow.graph.model_variables import build

    builds: list[Any] = []
    optimizer = SimpleNamespace(build=builds.append)  # as in tf_keras, which has no `built`
    build(optimizer, saved.model)
    optimizer._built = True
    build(optimizer, saved.model)
    return len(builds)


def restored_module(saved: Saved) -> Any:
    from gradring.tensorflow import restore

    saved.module.weight.assign([0.0, 0.0])
    restore(saved.module, saved.own / "module")
    return saved.module.weight.numpy().tolist()


def restored_layer(saved: Saved) -> dict[str, Any]:
    from gradring.tensorflow import restore

    head = saved.other.get_layer("head").get_weights()
    body = saved.model.get_layer("body").get_weights()
    restore(saved.other, saved.own / "model.keras", "*/body/*")
    return {
        "body": body,
        "only": same(saved.other.get_layer("body").get_weights(), body),
        "not the others": same(saved.other.get_layer("head").get_weights(), head),
    }


def restored_variable(saved: Saved) -> list[bool]:
    from gradring.tensorflow import restore

    head, whole = saved.other.get_layer("head"), saved.model.get_layer("head").get_weights()
    restore(saved.checkpoint_of(saved.other), saved.own / "checkpoint", [head.kernel])
    return [same([part], [other]) for part, other in zip(head.get_weights(), whole, strict=True)]


def refused_and_kept(saved: Saved) -> dict[str, Any]:
    """What cannot be restored, and whether a model stays as it was."""
    import keras
    import tensorflow as tf

    from gradring.errors import RestoreError
    from gradring.tensorflow import restore

    def refused(model: Any, kind: str, only: Any = None) -> Any:
        with pytest.raises(RestoreError) as raised:
            restore(model, saved.own / kind, only)
        return raised.value.rank, str(raised.value)

    other, weight = saved.other, saved.module.weight
    before = state(other)
    with saved.strategy.scope():
        larger = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(5, name="body")])
        unbuilt = keras.Sequential([keras.layers.Dense(5)])
    iterator = iter(tf.data.Dataset.range(3))
    said = {
        "missing": refused(other, "missing.keras"),
        "torn": refused(other, "torn.keras"),
        "other shape": refused(larger, "model.keras"),
        "not built": refused(unbuilt, "model.keras"),
        "no such variable": refused(other, "model.keras", ["*/body/*", "*/tail/*"]),
        "directory": refused(other, "module"),
        "text": refused(tf.train.Checkpoint(w=weight, text=tf.Variable("a")), "checkpoint"),
        "iterator": refused(tf.train.Checkpoint(w=weight, it=iterator), "checkpoint"),
        "name too long": refused(other, 300 * "x" + ".keras"),
    }
    return {"refused": said, "kept": same(before, state(other))}


def differing(saved: Saved) -> list[tuple[int | None, str]]:
    """What `check_replicas` and its callback say of a model that differs on rank 1."""
    import tensorflow as tf

    from gradring.errors import MismatchError
    from gradring.tensorflow import check_replicas
    from gradring.tensorflow.callbacks import CheckReplicas

    other, rank = saved.other, saved.comm.rank
    partial_sum = tf.Variable(float(rank), name="kernel_gradient_accumulator")
    texts = tf.Variable(["a", "b"])
    variables = [
        *other.variables,
        *other.optimizer.variables,
        saved.counter,
        partial_sum,
        texts,
    ]
    saved.count(float(rank))
    check_replicas(variables)
    if rank == 1:
        kernel = other.get_layer("head").kernel
        with tf.init_scope():
            kernel.value.values[0].assign_add(1e-6 * tf.ones_like(kernel))
    with pytest.raises(MismatchError) as differs:
        check_replicas(variables)
    x = np.ones((8, 4), np.float32)
    with pytest.raises(MismatchError) as differs_in_fit:
        other.fit(x, x[:, :2], batch_size=8, verbose=0, callbacks=[CheckReplicas(every_steps=1)])
    return [(raised.value.rank, str(raised.value)) for raised in (differs, differs_in_fit)]


def committed(comm: Any, directory: Path) -> Any:
    """A `fit` that is broken off in the middle of an epoch, and another process that goes on."""
    import keras
    import tensorflow as tf

    from gradring.tensorflow import CustomCollectiveStrategy
    from gradring.tensorflow.elastic import CommitState, State

    strategy = CustomCollectiveStrategy(communicator=comm)
    x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    batches = tf.data.Dataset.from_tensor_slices((x, x[:, :2])).batch(8)  # 8 steps

    def fresh(seed: int, place: Path) -> tuple[Any, Any]:
        with strategy.scope():
            model = small_model(seed)
            model.compile(keras.optimizers.Adam(0.01), "mse")
        state = State(model=model, epoch=0, step=0)
        state.checkpoint_to(place / str(comm.rank))
        state.sync(comm)
        return model, state

    class Break(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if int(np.array(self.model.optimizer.iterations)) == 8 + 5:
                raise KeyboardInterrupt

    def all_of(model: Any) -> Any:
        return [np.array(v) for v in (*model.weights, *model.optimizer.variables)]

    whole, state = fresh(1, directory / "whole")
    whole.fit(batches, epochs=3, verbose=0, callbacks=[CommitState(state)])
    found: dict[str, Any] = {"end": (state.epoch, state.step)}
    broken, state = fresh(1, directory / "broken")
    with pytest.raises(KeyboardInterrupt):
        callbacks = [CommitState(state, every_steps=2), Break()]
        broken.fit(batches, epochs=3, verbose=0, callbacks=callbacks)
    state.flush()
    comm.barrier()
    # The file is on another host than that of rank 0, which has another start, too.
    if comm.rank == 0:
        (directory / "broken" / "0").rename(directory / "broken" / "2")
        (directory / "broken" / "1").rename(directory / "broken" / "0")
        (directory / "broken" / "2").rename(directory / "broken" / "1")
    comm.barrier()
    model, state = fresh(5 + comm.rank, directory / "broken")
    found["resumed"] = (state.epoch, state.step)
    commits = CommitState(state, every_steps=2)
    rest = batches.skip(state.step)
    model.fit(rest, initial_epoch=state.epoch, epochs=2, verbose=0, callbacks=[commits])
    model.fit(batches, initial_epoch=state.epoch, epochs=3, verbose=0, callbacks=[commits])
    found["same bits"] = same(all_of(model), all_of(whole))

    class StopFirst(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = comm.rank == 0

    stopping = State(model=model, stopped=False)
    model.fit(batches, epochs=2, verbose=0, callbacks=[StopFirst(), CommitState(stopping)])
    found["stopped"] = stopping.stopped
    model.set_weights([0 * weight for weight in model.get_weights()])
    state.restore()
    found["restored"] = same(all_of(model), all_of(whole))
    state.flush()
    return {"committed": found}


class ReadsWhatItAssigns:
    """A model that loads its weights as tf_keras does, on the one rank that has the file."""

    built = True

    def __init__(self, variable: Any) -> None:
        self.variables = [variable]

    def load_weights(self, path: str) -> None:
        self.variables[0].assign(7.0)
        self.variables[0].read_value()


class OnlyOn:
    """A model that only the rank with `here == 1` can save."""

    def __init__(self, here: int) -> None:
        self._here = here

    def save(self, path: str) -> None:
        if not self._here:
            raise PermissionError("not here")
        Path(path).touch()


def same(these: Any, those: Any) -> bool:
    pairs = zip(these, those, strict=True)
    return all(np.array_equal(this, that) for this, that in pairs)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saving")


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, directory: Path) -> Any:
    return run_ranks(saved_and_updated, 2, str(directory), chosen(request, "case"), timeout=300)


@pytest.mark.parametrize("case", marked(itertools.product(KINDS, WAYS), QUICK), ids="-".join)
def test_what_was_saved_is_loaded_on_every_worker(ranks: Any, case: Case) -> None:
    for found in ranks:
        assert found["differences"][case] <= 1e-6


def test_saving_leaves_the_weights_equal(ranks: Any) -> None:
    assert same(ranks[0]["weights"], ranks[1]["weights"])


def test_a_directory_that_does_not_exist_is_an_error_on_every_rank(ranks: Any) -> None:
    for found in ranks:
        rank, message, is_os_error = found["no directory"]
        assert rank == 0 and is_os_error
        assert "rank 0 on " in message and "FileNotFoundError" in message


def test_a_rank_that_cannot_write_is_named_on_every_rank(ranks: Any) -> None:
    for found in ranks:
        rank, message, _ = found["one rank"]
        assert rank == 1
        assert "rank 1 on " in message and "PermissionError: not here" in message


def test_a_second_save_replaces_the_first(ranks: Any) -> None:
    assert [found["replaced"] for found in ranks] == [True, True]


def test_a_variable_that_is_read_by_adding_up_is_saved_as_the_sum(ranks: Any) -> None:
    assert [found["counter"] for found in ranks] == [3.0, 3.0]


def test_a_partial_restore_on_the_chief_reaches_every_replica(ranks: Any) -> None:
    assert [(found["body"], found["head"]) for found in ranks] == [(True, True)] * 2


def test_a_model_whose_layers_reduce_is_exported_for_processes_without_gradring(
    ranks: Any,
) -> None:
    paths = [path for found in ranks for path in found["exported"]]
    loads = [sys.executable, "-c", LOAD_ELSEWHERE, *paths]
    elsewhere = subprocess.run(loads, capture_output=True, text=True, check=False)
    results = [json.loads(line) for line in elsewhere.stdout.splitlines()]
    assert len(results) == 4, elsewhere.stderr
    for number, result in enumerate(results):
        np.testing.assert_allclose(result, ranks[number // 2]["expected"], 1e-5)


def test_a_function_with_a_collective_is_not_exported_and_the_error_says_so(ranks: Any) -> None:
    for found in ranks:
        for message in found["refused"]:
            assert "gradring/a_function_with_a_collective_cannot_be_exported" in message


def test_saving_leaves_nothing_else_behind(ranks: Any, directory: Path) -> None:
    assert sorted(os.listdir(directory / "updated")) == [
        "body.data-00000-of-00001",
        "body.index",
        "counter.data-00000-of-00001",
        "counter.index",
        "twice",
    ]


def test_every_rank_restores_what_one_rank_has_saved(ranks: Any) -> None:
    for found in (rank["restored"] for rank in ranks):
        assert not found["fresh"]
        assert found["model.keras"]
        assert found["model.weights.h5"]
        assert found["checkpoint"]
        assert found["sum over the ranks"] == 3.0
        assert found["mean over the ranks"] == 7.0
        assert found["builds"] == 1
        assert found["steps of two optimizers"] == [5, 5]
        assert found["module"] == [1.0, 2.0]


def test_a_part_is_restored_and_the_others_keep_their_values(ranks: Any) -> None:
    for found in (rank["restored"] for rank in ranks):
        assert found["only"]
        assert found["not the others"]
        assert found["one variable"] == [True, False]


def test_chosen_variables_are_updated_between_two_steps_of_fit(ranks: Any) -> None:
    """From a checkpoint, and from one worker; the next step trains what all replicas have then."""
    (kept, first, sent, is_still), (_, second, _, _) = (
        rank["restored"]["while fit trains"] for rank in ranks
    )
    assert kept
    assert same(first, ranks[0]["restored"]["body"])
    assert same(first, second)
    assert sent
    assert not is_still


def test_what_cannot_be_restored_is_the_same_error_on_every_rank_and_changes_nothing(
    ranks: Any,
) -> None:
    for found in (rank["restored"] for rank in ranks):
        assert found["kept"]
        refused = found["refused"]
        assert "no rank can restore" in refused["missing"][1]
        assert refused["torn"][0] == 1
        assert "rank 1 on" in refused["torn"][1]
        assert refused["other shape"][0] == 1
        assert "has no variables yet" in refused["not built"][1]
        assert "only='*/tail/*' is no variable" in refused["no such variable"][1]
        assert "ends in .keras" in refused["directory"][1]
        assert "of strings cannot be sent" in refused["text"][1]
        assert "Iterator cannot be sent" in refused["iterator"][1]
        assert "no rank can restore" in refused["name too long"][1]


def test_a_replica_that_differs_is_named_with_its_first_variable(ranks: Any) -> None:
    for found in (rank["restored"] for rank in ranks):
        for rank, text in found["differs"]:
            assert rank == 1
            assert "head/kernel' is the first of" in text


def test_a_training_resumes_from_a_commit_in_the_middle_of_an_epoch_to_the_same_bits(
    ranks: Any,
) -> None:
    for found in (rank["committed"] for rank in ranks):
        assert found["end"] == (3, 0)
        assert found["resumed"] == (1, 4)
        assert found["same bits"]
        assert found["stopped"]
        assert found["restored"]
