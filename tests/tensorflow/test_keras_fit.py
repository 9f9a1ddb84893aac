"""`model.fit` of Keras 3 with validation, metrics and callbacks; MWMS cannot run it."""

import itertools
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradring.errors
from gradring.testing import RankFailure, run_ranks
from support.keras_models import (
    BATCH,
    CAN_FIT,
    compiled,
    dataset,
    needs_fit,
    samples,
    state_of,
    strategy_of,
)
from support.tf_worker import join

EPOCHS = 4
DIES_IN_EPOCH = 2


def fit(directory: str) -> Any:
    import keras

    with join() as comm:
        keras.utils.set_random_seed(comm.rank + 1)
        strategy = strategy_of(comm)
        model = compiled(strategy, "mlp", "Adam")
        best = os.path.join(directory, f"rank-{comm.rank}.keras")
        x, _ = samples()
        history = model.fit(
            dataset(),
            epochs=EPOCHS,
            verbose=0,
            validation_data=dataset(count=2 * BATCH),
            callbacks=[
                keras.callbacks.ModelCheckpoint(best, monitor="val_loss", save_best_only=True),
                # No accuracy is above two, so patience ends the training early.
                keras.callbacks.EarlyStopping("val_accuracy", baseline=2.0, patience=EPOCHS - 1),
            ],
        ).history
        of_batches = predictions_of_batches(comm, strategy, model, x)
        scores = model.evaluate(dataset(), verbose=0, return_dict=True)
        predicted = model.predict(dataset(), verbose=0)
        with strategy.scope():
            loaded = keras.models.load_model(os.path.join(directory, "rank-0.keras"), compile=False)
        return {
            "history": history,
            "weights": state_of(model, model.optimizer)["weights"],
            "scores": scores,
            # Replicas' parts of a batch come in another order; the set is the same.
            "predicted": np.sort(predicted, axis=0),
            "direct": np.sort(np.asarray(model(x)), axis=0),
            "predicted uncompiled": np.sort(loaded.predict(dataset(), verbose=0), axis=0),
            "of batches": of_batches,
            "direct uncompiled": np.sort(np.asarray(loaded(x)), axis=0),
            "loaded": [np.asarray(weight) for weight in loaded.get_weights()],
            "files": sorted(os.listdir(directory)),
        }


def predictions_of_batches(comm: Any, strategy: Any, model: Any, x: Any) -> dict[str, Any]:
    """By how `predict_on_batch` was called, what it gave and what the model gives.

    Ranks have batches of their own, and some calls are of the chief alone.
    """
    import keras

    rows = x[: 5 + comm.rank]
    found: dict[str, Any] = {}

    def predict(how: str, model: Any = model) -> None:
        found[how] = model.predict_on_batch(rows), np.asarray(model(rows))

    def predict_in_fit(epoch: int, logs: Any) -> None:
        if comm.rank == 0:
            predict("in fit")

    predict("outside")
    if comm.rank == 0:
        predict("alone")
    model.predict(x[:8], verbose=0)
    if comm.rank == 0:
        predict("after predict")
    with strategy.scope():
        predict("in the scope")
        other = compiled(strategy, "mlp", "Adam")
        callback = keras.callbacks.LambdaCallback(on_epoch_end=predict_in_fit)
        other.fit(dataset(), verbose=0, callbacks=[callback])
        new = keras.Sequential([keras.layers.Dense(2)])
    # It builds the model, with equal weights on all ranks.
    first = new.predict_on_batch(x[:3])
    found["new"] = first, np.asarray(new(x[:3]))
    kept = new.predict_function
    new.compile(run_eagerly=True)
    assert new.predict_function is None and kept is not None
    predict("compiled", new)
    return found


def resumed(directory: str, dies: bool) -> Any:
    """Trains with a backup and, unless the last rank kills itself in an epoch, without."""
    import keras

    class Death(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if dies and epoch == DIES_IN_EPOCH and comm.rank == comm.world_size - 1:
                os.kill(os.getpid(), signal.SIGKILL)

    with join() as comm:

        def train(*callbacks: Any) -> Any:
            keras.utils.set_random_seed(comm.rank + 1)
            model = compiled(strategy_of(comm), "mlp", "Adam")
            history = model.fit(dataset(), epochs=EPOCHS, verbose=0, callbacks=list(callbacks))
            return {**state_of(model, model.optimizer), "epochs": history.epoch}

        # Only the chief's directory counts: hosts need not share a file system.
        backup = os.path.join(directory, f"rank-{comm.rank}")
        return train(keras.callbacks.BackupAndRestore(backup), Death()), train()


def under_mwms(addresses: list[str]) -> str:
    """The same training with TensorFlow's own strategy; returns what it raises."""
    import json

    os.environ["TF_CONFIG"] = json.dumps(
        {
            "cluster": {"worker": addresses},
            "task": {"type": "worker", "index": int(os.environ["GRADRING_RANK"])},
        }
    )
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    model = compiled(strategy, "mlp", "Adam")
    try:
        model.fit(dataset(), verbose=0)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_ranks(fit, 1, str(tmp_path_factory.mktemp("alone")))[0]


@needs_fit
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_fit_trains_workers_as_one_process(alone: Any, world_size: int, tmp_path: Path) -> None:
    workers = run_ranks(fit, world_size, str(tmp_path))
    first = workers[0]
    for worker in workers:
        for part in ("weights", "loaded"):
            for mine, theirs in zip(first[part], worker[part], strict=True):
                assert mine.tobytes() == theirs.tobytes(), part
        assert worker["history"] == first["history"]
        assert worker["scores"] == first["scores"]
        # The chief alone writes checkpoints.
        assert worker["files"] == ["rank-0.keras"]
    for part in ("weights", "loaded"):
        for ours, expected in zip(first[part], alone[part], strict=True):
            np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5, err_msg=part)
    assert len(first["history"]["loss"]) == EPOCHS - 1
    assert first["history"].keys() == alone["history"].keys()
    for name, values in alone["history"].items():
        assert first["history"][name] == pytest.approx(values, abs=1e-5), name
    for name, value in alone["scores"].items():
        assert first["scores"][name] == pytest.approx(value, abs=1e-5), name
    for worker in workers:
        for how, (found, rows) in worker["of batches"].items():
            np.testing.assert_allclose(found, rows, atol=1e-6, err_msg=how)
        np.testing.assert_array_equal(worker["of batches"]["new"], first["of batches"]["new"])
    for model in ("", " uncompiled"):
        predicted, direct = (first[part + model] for part in ("predicted", "direct"))
        np.testing.assert_allclose(predicted, direct, atol=1e-6)


@needs_fit
@pytest.mark.slow
def test_a_killed_training_resumes_from_the_chiefs_backup(tmp_path: Path) -> None:
    with pytest.raises(RankFailure):
        run_ranks(resumed, 2, str(tmp_path), True)
    assert (tmp_path / "rank-0").is_dir()
    assert not (tmp_path / "rank-1").exists()
    (tmp_path / "rank-1").mkdir()
    workers = run_ranks(resumed, 2, str(tmp_path), False)
    # The chief removes its backup, and nobody touches what another rank has at its path.
    assert not (tmp_path / "rank-0").exists()
    assert (tmp_path / "rank-1").is_dir()
    for after_death, uninterrupted in workers:
        assert after_death["epochs"] == list(range(DIES_IN_EPOCH, EPOCHS))
        for part in ("weights", "optimizer"):
            for ours, expected in zip(after_death[part], uninterrupted[part], strict=True):
                assert ours.tobytes() == expected.tobytes(), part


@needs_fit
@pytest.mark.slow
def test_the_same_fit_fails_under_mwms() -> None:
    from gradring.machine.ports import free_ports

    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    raised = run_ranks(under_mwms, 2, addresses)
    for message in raised:
        assert "PerReplica" in message


def refused() -> list[str]:
    """What `fit` and `evaluate` say under an old Keras."""
    import keras

    with join() as comm:
        messages = []
        for method in ("fit", "evaluate"):
            model = compiled(strategy_of(comm), "mlp", "Adam")
            with pytest.raises(gradring.errors.ConfigError) as raised:
                getattr(model, method)(dataset(), verbose=0)
            messages.append(str(raised.value))
        assert keras.__version__ in messages[0]
        return messages


@pytest.mark.skipif(CAN_FIT, reason="this Keras is not refused")
def test_a_keras_that_fits_wrongly_is_refused() -> None:
    for messages in run_ranks(refused, 2):
        assert all("install keras>=3.10" in message for message in messages)


def fit_on_growing_data() -> list[int]:
    import keras
    import tensorflow as tf

    from gradring.tensorflow import CustomCollectiveStrategy

    made: list[int] = []
    steps: list[int] = []

    def batches() -> Any:
        made.append(len(made) + 1)
        yield from [np.ones((2, 1), np.float32)] * made[-1]

    class Count(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            steps.append(0)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            steps[-1] += 1

    with join() as comm:
        strategy = CustomCollectiveStrategy(communicator=comm)
        with strategy.scope():
            model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        spec = tf.TensorSpec([2, 1], tf.float32)
        data = tf.data.Dataset.from_generator(batches, output_signature=spec)
        data = data.map(lambda x: (x, x))
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        model.fit(data.with_options(options), epochs=4, verbose=0, callbacks=[Count()])
    return steps


@needs_fit
def test_an_epoch_may_have_more_steps_than_the_first() -> None:
    """As of a dataset that is read by input workers; Keras takes no more than the first had."""
    (steps,) = run_ranks(fit_on_growing_data, 1)
    assert [later - sooner for sooner, later in itertools.pairwise(steps)] == [1, 1, 1]


def fit_on_generators() -> dict[str, Any]:
    """How often each element was in a batch, by what gave them; each step adds up its elements."""
    import keras

    from gradring.tensorflow import CustomCollectiveStrategy

    count, size = 32, 4
    one_hot, target = np.eye(count, dtype=np.float32), np.full((size, 1), 100, np.float32)

    def batches() -> Any:
        for begin in range(0, count, size):
            yield one_hot[begin : begin + size], target

    def endless() -> Any:
        while True:
            yield from batches()

    sources = {"finite": (batches(), None), "endless": (endless(), count // size)}
    found = {}
    with join() as comm:
        strategy = CustomCollectiveStrategy(communicator=comm)
        for name, (source, steps) in sources.items():
            with strategy.scope():
                dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
                model = keras.Sequential([keras.Input([count]), dense])
                model.compile(keras.optimizers.SGD(1.0), "mean_absolute_error")
            model.fit(source, steps_per_epoch=steps, verbose=0)
            found[name] = (model.get_weights()[0].ravel() * size).tolist()
    return found


@needs_fit
def test_every_element_of_a_generator_is_in_one_step() -> None:
    """Building the model takes none of its batches, of which other ranks may take more."""
    for found in run_ranks(fit_on_generators, 2, timeout=120):
        assert found == {name: [1.0] * 32 for name in ("finite", "endless")}


def take_batches_outside_of_graphs() -> None:
    """Has Keras hand each batch to the graph of a step as an argument, as Keras 3.16 does."""
    import keras
    import tensorflow as tf

    def make_function(self: Any, step_function: Any) -> Any:
        strategy = self.distribute_strategy

        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def on_data(data: Any) -> Any:
            return strategy.reduce("MEAN", strategy.run(step_function, args=(data,)), axis=None)

        traced = tf.function(on_data, reduce_retracing=True)

        def function(batches: Any) -> Any:
            taken = batches.get_next_as_optional()
            if not taken.has_value():
                raise StopIteration
            return traced(taken.get_value())

        return function

    keras.Model._make_function = make_function


def fit_outside_of_graphs() -> Any:
    import keras

    from gradring.tensorflow import CustomCollectiveStrategy

    take_batches_outside_of_graphs()
    x = np.random.default_rng(0).normal(size=(15, 3)).astype(np.float32)
    with join() as comm:
        strategy = CustomCollectiveStrategy(communicator=comm)
        with strategy.scope():
            dense = keras.layers.Dense(1, kernel_initializer="ones")
            model = keras.Sequential([keras.Input([3]), dense])
            model.compile(keras.optimizers.SGD(0.3), "mse")
        history = model.fit(x, 2 * x[:, :1] + 1, batch_size=5, epochs=2, shuffle=False, verbose=0)
    return [*model.get_weights(), *history.history["loss"]]


@needs_fit
def test_batches_that_no_graph_takes_are_shared_by_their_sizes() -> None:
    """The shape that a graph knows of such a batch is that of one rank: 3 rows here, 2 there."""
    (alone,) = run_ranks(fit_outside_of_graphs, 1)
    for found in run_ranks(fit_outside_of_graphs, 2):
        for value, expected in zip(found, alone, strict=True):
            np.testing.assert_allclose(value, expected, rtol=1e-5)
