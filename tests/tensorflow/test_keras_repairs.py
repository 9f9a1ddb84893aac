"""Repairs of Keras 3: what it does from one replica's gradients or batch is done from all.

Each test fails when its repair in `compat_keras.py` is removed.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gradring.errors import ConfigError
from gradring.testing import run_ranks
from support.chosen import chosen, marked
from support.keras_models import (
    BATCH,
    CAN_FIT,
    KERAS_VERSION,
    assert_trained_alike,
    compiled,
    needs_fit,
    samples,
    state_of,
    strategy_of,
    train_by_fit,
    train_by_loop,
)
from support.tf_worker import join

# All cases are trained by two processes and by one before the first is judged.
pytestmark = pytest.mark.timeout(900)

TOLERANCE = 1e-5

#: Arguments of `train_by_fit`, where they are not these. The clips are well below the gradients, so
#: that they matter.
USUAL: dict[str, Any] = {"kind": "mlp", "optimizer": "SGD"}
OTHERS: dict[str, dict[str, Any]] = {
    "clipnorm": {"clipnorm": 0.05},
    "global_clipnorm": {"global_clipnorm": 0.05},
    "clipvalue": {"clipvalue": 0.01},
    "clipnorm of an embedding": {"kind": "embedding", "clipnorm": 0.05},
    "clipvalue of an embedding": {"kind": "embedding", "clipvalue": 0.001},
    "global_clipnorm of an embedding": {"kind": "embedding", "global_clipnorm": 0.05},
    "accumulation": {"optimizer": "Adam", "gradient_accumulation_steps": 3},
    "accumulation, clipped": {"gradient_accumulation_steps": 3, "global_clipnorm": 0.05},
    "EMA": {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 5},
    "steps_per_execution": {"optimizer": "Adam", "run": {"steps_per_execution": 5}},
    "run_eagerly": {"optimizer": "Adam", "run": {"run_eagerly": True}},
}
CASES = {name: USUAL | others for name, others in OTHERS.items()}

EMBEDDINGS = tuple(name for name in CASES if "embedding" in name)

#: Those of them that also run in a loop of one's own.
IN_A_LOOP = ("clipnorm", "global_clipnorm", "clipvalue", "EMA", "accumulation, clipped")

#: In every run of the tests, beside the loops, which are traced sooner: what these do not show.
QUICK = (
    "global_clipnorm of an embedding",
    "steps_per_execution",
    "on_batches",
    "added_loss",
)

#: Keras before 3.5 clips and then accumulates, which is refused.
CLIPPED_AND_ACCUMULATED = "accumulation, clipped"
CLIPS_FIRST = KERAS_VERSION < (3, 5)


def train_all(names: tuple[str, ...]) -> Any:
    """By name: a case, one in a loop, or a training."""
    import keras

    from gradring.tensorflow import CustomCollectiveStrategy

    results = {}
    with join() as comm:

        def record(name: str, train: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
            keras.backend.clear_session()
            keras.utils.set_random_seed(comm.rank + 1)
            results[name] = train(*args, **kwargs)

        for name in IN_A_LOOP:
            refused = CLIPS_FIRST and name == CLIPPED_AND_ACCUMULATED
            if f"loop, {name}" in names and not refused:
                record(f"loop, {name}", train_by_loop, strategy_of(comm), **CASES[name])
        if CAN_FIT:
            for name in [name for name in CASES if name in names]:
                record(name, train_by_fit, strategy_of(comm), **CASES[name])
                if comm.world_size == 1 and name in EMBEDDINGS:
                    one = CustomCollectiveStrategy(communicator=comm)
                    record(f"one worker, {name}", train_by_fit, one, **CASES[name])
            for name in [name for name in TRAININGS if name in names]:
                record(name, TRAININGS[name], comm)
            if comm.world_size == 1 and "on_batches" in names:
                one = CustomCollectiveStrategy(communicator=comm)
                record("one worker, on_batches", on_batches, comm, one)
        if comm.world_size > 1:
            results["masked"] = masked_statistics(comm)
            if CLIPS_FIRST:
                results["refusal"] = refusal(comm)
    return results


def refusal(comm: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        train_by_loop(strategy_of(comm), **CASES[CLIPPED_AND_ACCUMULATED])
    return str(raised.value)


def overflow(comm: Any) -> Any:
    """One sample of the second of four steps, in the last worker's part, overflows."""
    import tensorflow as tf

    x, y = samples(count=4 * BATCH)
    x[2 * BATCH - 1] = 3e38
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    model = compiled(strategy_of(comm), "mixed precision", "SGD momentum")
    model.fit(data, verbose=0)
    return {
        **state_of(model, model.optimizer),
        "logs": {},
        "scale": float(model.optimizer.dynamic_scale.numpy()),
        "steps": int(model.optimizer.iterations.numpy()),
    }


def on_batches(comm: Any, strategy: Any = None) -> Any:
    """`train_on_batch` with each rank's own part, and what the model scores then."""
    model = compiled(strategy or strategy_of(comm), "mlp", "Adam")
    x, y = samples()
    share = BATCH // comm.world_size
    logs = []
    for step in range(4):
        start = step * BATCH + comm.rank * share
        mine = slice(start, start + share)
        logs.append(model.train_on_batch(x[mine], y[mine], return_dict=True)["loss"])
    last = slice(4 * BATCH + comm.rank * share, 4 * BATCH + (comm.rank + 1) * share)
    logs.append(model.test_on_batch(x[last], y[last], return_dict=True)["loss"])
    return {**state_of(model, model.optimizer), "logs": {"loss": [float(v) for v in logs]}}


def added_loss(comm: Any) -> Any:
    """A layer that adds a loss, as one of Keras' loss objects computes it."""
    import keras

    class Endpoint(keras.layers.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.loss_of = keras.losses.MeanSquaredError()
            self.dense = keras.layers.Dense(1)

        def call(self, x: Any) -> Any:
            outputs = self.dense(x)
            self.add_loss(self.loss_of(x[:, :1], outputs))
            self.add_loss(keras.ops.mean(outputs**2))
            return outputs

    with strategy_of(comm).scope():
        model = keras.Sequential([keras.layers.Input((8,)), Endpoint()])
        model.compile(keras.optimizers.SGD(0.1))
    logs = model.fit(samples()[0], batch_size=BATCH, shuffle=False, verbose=0).history
    return {**state_of(model, model.optimizer), "logs": logs}


def without_call(comm: Any) -> Any:
    """A model that only its own `train_step` can compute, and layers that its first step builds."""
    import keras
    import tensorflow as tf

    strategy = strategy_of(comm)

    class Autoencoder(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.encoder = keras.layers.Dense(4, activation="tanh")
            self.decoder = keras.layers.Dense(8)
            self.loss_of_epoch = keras.metrics.Mean("loss")

        @property
        def metrics(self) -> list[Any]:
            return [self.loss_of_epoch]

        def train_step(self, x: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self.decoder(self.encoder(x)) - x) ** 2)
                scaled = loss / strategy.num_replicas_in_sync
            gradients = tape.gradient(scaled, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            self.loss_of_epoch.update_state(loss)
            return {"loss": self.loss_of_epoch.result()}

    with strategy.scope():
        model = Autoencoder()
        model.compile(keras.optimizers.Adam(0.01))
    history = model.fit(samples()[0], batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    return {**state_of(model, model.optimizer), "logs": history.history}


def own_logs(comm: Any) -> Any:
    """A metric whose result is its variable, and a step that logs a Python number."""
    import keras

    class Rows(keras.metrics.Metric):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.count = self.add_weight(name="count", initializer="zeros")

        def update_state(self, truth: Any, _: Any, sample_weight: Any = None) -> None:
            self.count.assign_add(keras.ops.cast(keras.ops.shape(truth)[0], "float32"))

        def result(self) -> Any:
            return self.count

    class Noted(keras.Sequential):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            return {**super().train_step(data), "note": 0.5}

    of_batches = []
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda _, logs: of_batches.append(logs)
    )
    with strategy_of(comm).scope():
        layers = [keras.layers.Input((8,)), keras.layers.Dense(1)]
        counts, notes = keras.Sequential(layers), Noted(layers)
        counts.compile(keras.optimizers.SGD(0.1), "mse", metrics=[Rows()])
        notes.compile(keras.optimizers.SGD(0.1), "mse")
    x, y = samples(count=4 * BATCH)
    logs = {}
    for model in (counts, notes):
        history = model.fit(x, y, BATCH, shuffle=False, verbose=0, callbacks=[note]).history
        logs.update(history)
    logs["batches"] = [log.get("rows", log.get("note")) for log in of_batches]
    return {**state_of(counts, counts.optimizer), "logs": logs}


def plain_normalisation(comm: Any) -> Any:
    """One step and then three more of a layer that is not synchronised."""
    import tensorflow as tf

    model = compiled(strategy_of(comm), "plain BN", "SGD")
    statistics = model.layers[1]
    x, y = samples(count=4 * BATCH)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    model.fit(data.take(1), verbose=0)
    after_one = np.asarray(statistics.moving_mean)
    model.fit(data.skip(1), verbose=0)
    return {"after one": after_one, **state_of(model, model.optimizer)}


def uneven(count: int, comm: Any) -> Any:
    """Data that does not divide by the workers: 9 and 8 samples of the first batch, or 1 and 0."""
    model = compiled(strategy_of(comm), "mlp", "SGD")
    x, y = samples(count=count)
    return {
        "scores": model.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True),
        "predicted": model.predict(x, batch_size=BATCH, verbose=0),
        # Workers that shuffle differently would get parts that overlap.
        "loss": model.fit(x, y, BATCH, shuffle=False, verbose=0).history["loss"][0],
        "weights": model.get_weights(),
    }


def few_rows(comm: Any) -> Any:
    """One row and three, of layers that cannot compute no row."""
    import keras

    with strategy_of(comm).scope():
        layers = [keras.layers.Input((4, 2)), keras.layers.LSTM(3), keras.layers.Reshape((-1, 1))]
        graph, eager = keras.Sequential(layers), keras.Sequential(layers)
    graph.compile(run_eagerly=False)
    eager.compile(run_eagerly=True)
    rows = samples()[0].reshape(-1, 4, 2)
    return [
        model.predict(rows[:count], batch_size=2, verbose=0)
        for model in (graph, eager)
        for count in (1, 3)
    ]


def messages(comm: Any) -> float:
    """Collectives of a step of `fit` with a loss and a metric."""
    import tensorflow as tf

    model = compiled(strategy_of(comm), "mlp", "SGD")
    x, y = samples(count=8 * BATCH)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)

    def count_of(steps: int) -> int:
        before = comm.stats()["count"]
        model.fit(data.take(steps), verbose=0)
        return int(comm.stats()["count"] - before)

    count_of(1)
    return (count_of(8) - count_of(4)) / 4


def no_batches(comm: Any) -> Any:
    """The rest of an epoch of which every step is done."""
    import keras
    import tensorflow as tf

    x, y = samples(count=BATCH)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    model = compiled(strategy_of(comm), "mlp", "Adam")
    before = [np.asarray(weight).tolist() for weight in model.weights]
    ended: list[Any] = []
    callback = keras.callbacks.LambdaCallback(on_epoch_end=lambda *end: ended.append(end))
    model.fit(data.skip(1), verbose=0, callbacks=[callback])
    return ended, before == [np.asarray(weight).tolist() for weight in model.weights]


def masked_statistics(comm: Any) -> Any:
    """Those of a synchronised normalisation, by steps that a mask leaves: 1 and 2, and 6."""
    import keras
    import tensorflow as tf

    strategy = strategy_of(comm)
    with strategy.scope():
        layer = keras.layers.BatchNormalization(momentum=0.0, synchronized=True, epsilon=0.0)
        layer.build((None, 3, 1))
    steps = tf.constant([[1.0, 2.0, 50.0], [6.0, 60.0, 70.0]])[comm.rank, None, :, None]
    mask = tf.constant([[True, True, False], [True, False, False]])[comm.rank, None]
    outputs = strategy.run(lambda: layer(steps, training=True, mask=mask))
    moving = float(np.asarray(layer.moving_mean)[0]), float(np.asarray(layer.moving_variance)[0])
    return *moving, outputs.numpy().ravel().tolist()[: (2, 1)[comm.rank]]


TRAININGS: dict[str, Callable[[Any], Any]] = {
    "overflow": overflow,
    "on_batches": on_batches,
    "added_loss": added_loss,
    "without_call": without_call,
    "own_logs": own_logs,
    "plain_normalisation": plain_normalisation,
    "uneven_17": functools.partial(uneven, 17),
    "uneven_1": functools.partial(uneven, 1),
    "few_rows": few_rows,
    "no_batches": no_batches,
    "messages": messages,
}


def workers_and_one(*names: str) -> tuple[list[Any], Any]:
    """What two workers and one process make of what has these names."""
    workers = run_ranks(train_all, 2, names, timeout=600)
    (alone,) = run_ranks(train_all, 1, names, timeout=600)
    return workers, alone


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest) -> Any:
    loops = [f"loop, {name}" for name in chosen(request, "name")]
    uneven = [f"uneven_{count}" for count in chosen(request, "count")]
    return workers_and_one(*loops, *uneven, *chosen(request, "case"), "overflow", "messages")


@pytest.mark.parametrize("name", IN_A_LOOP)
def test_a_loop_on_two_workers_trains_as_one_process(trained: Any, name: str) -> None:
    if CLIPS_FIRST and name == CLIPPED_AND_ACCUMULATED:
        pytest.skip("needs Keras 3.5")
    workers, alone = trained
    case = f"loop, {name}"
    assert_trained_alike([worker[case] for worker in workers], alone[case], TOLERANCE)


@pytest.mark.skipif(not CLIPS_FIRST, reason="this Keras is not refused")
def test_clipping_before_accumulation_is_refused(trained: Any) -> None:
    for worker in trained[0]:
        assert "install keras>=3.5" in worker["refusal"]


@needs_fit
@pytest.mark.parametrize(
    "case", marked([*CASES, "on_batches", "added_loss", "without_call", "own_logs"], QUICK)
)
def test_two_workers_train_as_one_process(trained: Any, case: str) -> None:
    workers, alone = trained
    assert_trained_alike([worker[case] for worker in workers], alone[case], TOLERANCE)


@needs_fit
@pytest.mark.parametrize("case", marked((*EMBEDDINGS, "on_batches"), (QUICK[0], "on_batches")))
def test_one_worker_trains_as_two_do(trained: Any, case: str) -> None:
    workers, alone = trained
    assert_trained_alike(
        [worker[case] for worker in workers], alone[f"one worker, {case}"], TOLERANCE
    )


@needs_fit
def test_all_workers_skip_a_step_in_which_one_overflows(trained: Any) -> None:
    workers, alone = trained
    results = [worker["overflow"] for worker in workers]
    for result in [*results, alone["overflow"]]:
        assert (result["steps"], result["scale"]) == (3, 2.0**14)
    assert_trained_alike(results, alone["overflow"], 1e-3)
    assert all(np.isfinite(weight).all() for weight in results[0]["weights"])


@pytest.mark.slow
@needs_fit
def test_statistics_of_plain_batch_normalisation_are_the_mean_over_the_workers() -> None:
    (first, second), alone = workers_and_one("plain_normalisation")
    first, second = first["plain_normalisation"], second["plain_normalisation"]
    for part in ("weights", "optimizer"):
        for mine, theirs in zip(first[part], second[part], strict=True):
            assert mine.tobytes() == theirs.tobytes()
    # Afterwards the weights differ: each worker normalises its own half of the batch.
    expected = alone["plain_normalisation"]["after one"]
    np.testing.assert_allclose(first["after one"], expected, rtol=0, atol=1e-6)


@pytest.mark.slow
@needs_fit
def test_an_epoch_without_batches_only_ends() -> None:
    workers, alone = workers_and_one("no_batches")
    for process in (*workers, alone):
        assert process["no_batches"] == ([(0, {})], True)


def test_a_masked_synchronised_normalisation_counts_the_steps_of_all_workers(trained: Any) -> None:
    workers, _ = trained
    deviation = np.sqrt(14 / 3)
    for worker, steps in zip(workers, ([1.0, 2.0], [6.0]), strict=True):
        mean, variance, outputs = worker["masked"]
        assert (mean, variance) == pytest.approx((3.0, 14 / 3), rel=1e-5)
        assert outputs == pytest.approx([(step - 3.0) / deviation for step in steps], rel=1e-4)


@needs_fit
def test_the_loss_and_metrics_of_a_step_travel_together(trained: Any) -> None:
    workers, _ = trained
    # Whether there is a batch, the gradients, and the logs.
    assert [worker["messages"] for worker in workers] == [3, 3]


@needs_fit
@pytest.mark.parametrize("count", marked((17, 1), (1,)))
def test_data_that_does_not_divide_by_the_workers_is_used_once(trained: Any, count: int) -> None:
    workers, alone = trained
    name = f"uneven_{count}"
    expected = alone[name]
    first = workers[0][name]
    for result in (worker[name] for worker in workers):
        assert result["scores"] == pytest.approx(expected["scores"], abs=1e-5)
        assert result["loss"] == pytest.approx(expected["loss"], abs=1e-5)
        np.testing.assert_allclose(result["predicted"], expected["predicted"], atol=1e-5)
        weights = zip(first["weights"], result["weights"], expected["weights"], strict=True)
        for mine, theirs, alone_s in weights:
            assert mine.tobytes() == theirs.tobytes()
            np.testing.assert_allclose(mine, alone_s, rtol=0, atol=1e-5)


@pytest.mark.slow
@needs_fit
def test_fewer_rows_than_workers_are_predicted() -> None:
    workers, alone = workers_and_one("few_rows")
    for worker in workers:
        for mine, expected in zip(worker["few_rows"], alone["few_rows"], strict=True):
            np.testing.assert_allclose(mine, expected, rtol=0, atol=1e-6)
