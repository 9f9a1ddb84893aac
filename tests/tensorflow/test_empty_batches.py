"""Workers without samples: every layer, loss and metric of Keras, and every way to train.

TensorFlow has its own defaults here, of which oneDNN is one: it decides what kernels do with no
rows.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import keras_layers
import keras_sequences
import numpy as np
import pytest

from gradring.testing import run_ranks
from support.chosen import chosen, marked
from support.keras_models import KERAS_VERSION, needs_fit, strategy_of

pytestmark = needs_fit

#: Two full batches, and one of a single sample, which one worker has.
BATCH, COUNT = 6, 13

#: Of rank 0 and rank 1 in each step; the data of rank 1 end earlier.
PARTS = ((3, 2), (3, 0), (2, 0))

#: What is no loss or metric of one output, and why.
NOT_COMPARED = {
    "CTC": "takes sequences of labels",
    "Loss": "is the base of all losses",
    "Mean": "takes values, and is the loss in all logs",
    "MeanMetricWrapper": "is the base of many metrics",
    "Metric": "is the base of all metrics",
    "Sum": "takes values",
}


# Every layer


def train_layers(kinds: tuple[str, ...], only: tuple[str, ...] = ()) -> dict[str, Any]:
    """By kind of input, the history of `fit` and all variables afterwards; of all layers or `only`
    these.
    """
    import keras
    import tensorflow as tf

    import gradring

    results = {}
    made = {n: b for n, b in keras_layers.branches().items() if not only or n in only}
    with gradring.init() as comm:
        strategy = strategy_of(comm)
        for kind in kinds:
            chosen = {n: b for n, b in made.items() if keras_layers.kind_of(n) == kind}
            keras.utils.set_random_seed(3)
            with strategy.scope():
                model = keras_layers.model_of(kind, chosen)
                # The loss is the mean over all branches, too.
                model.compile(keras.optimizers.SGD(0.003 * len(chosen)), "mse", metrics=["mae"])
            x = tf.constant(keras_layers.samples(kind, COUNT))
            y = np.tile(np.linspace(0, 1, COUNT, dtype=np.float32)[:, None], (1, len(chosen)))
            fit = model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
            results[kind] = {
                "logs": fit.history,
                "variables": {v.path: np.asarray(v) for v in model.variables},
            }
    return results


#: In every run of the tests: layers that loop over time, attend, normalise, pool and draw.
QUICK = (
    *("BatchNormalization_synchronized", "GRU", "MultiHeadAttention"),
    *("GlobalMaxPooling2D", "RandomFlip"),
)

#: Kinds of input, layers of them (none: all), workers, and whether oneDNN is on, if it is said.
GRID = [
    pytest.param((("sequence", "image"), QUICK, 2, None), id="some layers, 2 workers"),
    pytest.param((("image",), (), 2, True), id="images, 2 workers", marks=pytest.mark.slow),
    *(
        pytest.param(
            (tuple(keras_layers.INPUTS), (), workers, has_onednn),
            id=f"{workers} workers with{'' if has_onednn else 'out'} oneDNN",
            marks=pytest.mark.slow,
        )
        for workers in (2, 3)
        for has_onednn in (True, False)
    ),
]


@pytest.fixture(scope="module")
def alone() -> dict[Any, Any]:
    """What one process trains, by kinds and oneDNN; filled when it is asked for."""
    return {}


@pytest.mark.timeout(1500)  # one graph with every layer of Keras, in up to four processes
@pytest.mark.parametrize("case", GRID)
def test_layers_train_as_in_one_process(
    case: tuple[Any, Any, int, bool | None], alone: Any
) -> None:
    *what, workers, has_onednn = case
    env = {} if has_onednn is None else {"TF_ENABLE_ONEDNN_OPTS": str(int(has_onednn))}
    key = (*what, has_onednn)
    if key not in alone:
        (alone[key],) = run_ranks(train_layers, 1, *what, timeout=700, env=env)
    ranks = run_ranks(train_layers, workers, *what, timeout=1400, env=env)
    for kind, expected in alone[key].items():
        first = ranks[0][kind]
        for result in (rank[kind] for rank in ranks):
            assert list(result["variables"]) == list(expected["variables"])
            for path, value in result["variables"].items():
                name = f"{kind}: {path}"
                assert value.tobytes() == first["variables"][path].tobytes(), name
                assert np.isfinite(value).all() if value.dtype.kind == "f" else True, name
                if keras_layers.is_of_one_process(path):
                    np.testing.assert_allclose(
                        value, expected["variables"][path], rtol=1e-3, atol=1e-5, err_msg=name
                    )
            assert np.isfinite(result["logs"]["loss"] + result["logs"]["mae"]).all(), kind


def test_every_layer_of_keras_has_a_branch_or_a_reason() -> None:
    from keras import layers

    have = {name.split("_")[0] for name in keras_layers.branches()}
    assert have | set(keras_layers.LEFT_OUT) == set(keras_layers.names(layers))
    assert not have & set(keras_layers.LEFT_OUT)


# Every loss and metric


#: In every run of the tests: losses and metrics that are means over samples, and others.
SOME = (
    *("CategoricalCrossentropy", "SparseCategoricalCrossentropy", "Dice"),
    *("AUC", "F1Score", "MeanIoU", "RootMeanSquaredError", "SparseCategoricalAccuracy"),
)


def of_losses_and_metrics(comm: Any, which: str) -> Any:
    """Trains and evaluates a model with an output for every loss, and all metrics; or some.

    No more than one sample at a time, which only one worker has: not every loss or metric is a mean
    over samples.
    """
    import keras

    def chosen(module: Any) -> dict[str, Any]:
        found = keras_layers.names(module).items()
        return {
            n: of for n, of in found if (n in SOME if which == "some" else n not in NOT_COMPARED)
        }

    losses = {name: of() for name, of in chosen(keras.losses).items()}
    options: dict[str, dict[str, Any]] = {
        "BinaryIoU": {"target_class_ids": [0]},
        "IoU": {"num_classes": 2, "target_class_ids": [0]},
        "MeanIoU": {"num_classes": 2},
        "OneHotIoU": {"num_classes": 2, "target_class_ids": [0]},
        "OneHotMeanIoU": {"num_classes": 2},
        "PrecisionAtRecall": {"recall": 0.5},
        "RecallAtPrecision": {"precision": 0.5},
        "SensitivityAtSpecificity": {"specificity": 0.5},
        "SpecificityAtSensitivity": {"sensitivity": 0.5},
    }
    made = {n: of(name=n, **options.get(n, {})) for n, of in chosen(keras.metrics).items()}
    sparse = [metric for n, metric in made.items() if n.startswith("Sparse")]
    others = [metric for n, metric in made.items() if not n.startswith("Sparse")]
    metrics = {"SparseCategoricalCrossentropy": sparse, "CategoricalCrossentropy": others}
    with strategy_of(comm).scope():
        given = keras.layers.Input((2,))
        ends = {
            name: keras.layers.Dense(2, "softmax", kernel_initializer="ones") for name in losses
        }
        model = keras.Model(given, {name: end(given) for name, end in ends.items()})
        model.compile(keras.optimizers.SGD(0.1), losses, metrics=metrics)
    x, labels, rows = np.array([[1.0, 2.0], [1.5, 0.5]]), np.array([0, 1]), np.eye(2)
    y = {name: labels if name in ("Circle", *metrics)[:2] else rows for name in losses}
    logs: list[Any] = []
    for i in (0, 1):
        sample = x[i : i + 1], {name: each[i : i + 1] for name, each in y.items()}
        logs.append(model.fit(*sample, batch_size=4, verbose=0).history)
        logs.append(model.evaluate(*sample, batch_size=4, verbose=0, return_dict=True))
    return {"weights": model.get_weights(), "logs": logs}


# Every way to train


def images(step: int, rank: int | None) -> tuple[Any, Any]:
    """The samples of a rank in a step, or of both."""
    draw = np.random.default_rng(step)
    count = sum(PARTS[step])
    x = draw.uniform(size=(count, 8, 8, 3)).astype(np.float32)
    y = x.mean((1, 2, 3))[:, None] + draw.normal(size=(count, 1)).astype(np.float32)
    rows = {None: slice(None), 0: slice(PARTS[step][0]), 1: slice(PARTS[step][0], None)}[rank]
    return x[rows], y[rows]


def own_data(comm: Any, has_strategy: bool = True) -> Any:
    """This rank's batches, as files of its own give them; or those of both ranks."""
    import tensorflow as tf

    steps = range(len(PARTS))
    if comm.world_size == 1:
        specs = (tf.TensorSpec([None, 8, 8, 3], tf.float32), tf.TensorSpec([None, 1], tf.float32))
        return tf.data.Dataset.from_generator(
            lambda: (images(step, None) for step in steps), output_signature=specs
        )
    parts = zip(*(images(step, comm.rank) for step in steps), strict=True)
    files = tf.data.Dataset.from_tensor_slices(tuple(np.concatenate(part) for part in parts))
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    # Under a strategy, the size is that of the batches of all ranks.
    size = PARTS[0][0] * (comm.world_size if has_strategy else 1)
    return files.batch(size).with_options(options)


def network(
    comm: Any,
    normalisation: str | None = "synchronized",
    activity: str | None = "l2",
    **options: Any,
) -> Any:
    """A compiled model of layers that cannot compute no rows."""
    import keras
    from keras import layers

    has_means = normalisation is not None
    normalise = layers.BatchNormalization(
        momentum=0.7, synchronized=normalisation == "synchronized"
    )
    keras.utils.set_random_seed(5)
    with strategy_of(comm).scope():
        model = keras.Sequential(
            [
                layers.Input((8, 8, 3)),
                layers.Conv2D(4, 3, activation="relu", kernel_regularizer="l2"),
                layers.MaxPooling2D(),
                layers.DepthwiseConv2D(2, use_bias=False),
                *([normalise] if has_means else []),
                layers.Flatten(),
                layers.Dense(1, activity_regularizer=activity),
            ]
        )
        model.compile(keras.optimizers.SGD(0.02, momentum=0.9), "mse", metrics=["mae"], **options)
    return model


def state_of(model: Any, logs: Any = ()) -> dict[str, Any]:
    return {"weights": model.get_weights(), "logs": logs}


def by_fit(comm: Any, **options: Any) -> Any:
    model = network(comm, **options)
    fit = model.fit(own_data(comm), epochs=2, verbose=0)
    scores = model.evaluate(own_data(comm), verbose=0)
    return state_of(model, [*fit.history.values(), scores])


def by_fit_of_few_samples(comm: Any) -> Any:
    """Plain batch normalisation, as one rank has all samples; of an endless dataset, too."""
    import tensorflow as tf

    model = network(comm, "plain")
    x, y = images(0, None)
    data = tf.data.Dataset.from_tensor_slices((x[:1], y[:1])).batch(4)
    logs = [model.fit(data, verbose=0).history, model.fit(x[1:2], y[1:2], verbose=0).history]
    logs.append(model.fit(data.repeat(), steps_per_epoch=2, verbose=0).history)
    return state_of(model, [value for each in logs for value in each.values()])


def by_fit_of_own_batches(comm: Any) -> Any:
    """Made by a function: a rank has fewer; endless ones, of sizes that are fixed and unlike."""
    import tensorflow as tf

    rank = None if comm.world_size == 1 else comm.rank

    def endless(_: Any) -> Any:
        x, y = images(0, rank)
        data = tf.data.Dataset.from_tensor_slices((x, y))
        return data.batch(len(x), drop_remainder=True).repeat()

    def fitted(make: Any, each: int = 1, **options: Any) -> Any:
        model = network(comm, steps_per_execution=each)
        data = model.distribute_strategy.distribute_datasets_from_function(make)
        fit = model.fit(data, epochs=2, verbose=0, **options)
        return state_of(model, [*fit.history.values()])

    found = [fitted(endless, each, steps_per_epoch=2) for each in (1, 2)]
    found.append(fitted(lambda _: own_data(comm, has_strategy=False)))
    names = ("weights", "logs")
    return {name: [part for each in found for part in each[name]] for name in names}


def by_fit_of_two_outputs(comm: Any) -> Any:
    """Each has a loss in the logs, which Keras counts once for each batch."""
    import keras

    draw = np.random.default_rng(2)
    x, ends = draw.normal(size=(7, 3)).astype(np.float32), ("value", "other")
    y = {name: draw.normal(size=(7, 1)).astype(np.float32) for name in ends}
    keras.utils.set_random_seed(5)
    with strategy_of(comm).scope():
        given = keras.Input((3,))
        model = keras.Model(given, {name: keras.layers.Dense(1, name=name)(given) for name in ends})
        model.compile(keras.optimizers.SGD(0.1), dict.fromkeys(ends, "mse"))
    fit = model.fit(x, y, batch_size=3, epochs=2, shuffle=False, verbose=0)
    return state_of(model, list(fit.history.values()))


def by_fit_of_ragged_rows(comm: Any) -> Any:
    """Texts of any number of words, which have any number of letters; of seven, a rank has none."""
    import keras
    import tensorflow as tf

    class Total(keras.layers.Layer):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            axes = list(range(1, x.shape.rank))
            return tf.cast(tf.reduce_sum(x, axes), tf.float32)[:, tf.newaxis]

    class Own(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.total, self.dense = Total(), keras.layers.Dense(1)

        def call(self, inputs: Any) -> Any:
            return self.dense(tf.concat([self.total(each) for each in inputs], 1))

    words = tf.RaggedTensor.from_row_lengths(tf.range(16.0) / 9, [1, 3, 2, 0, 4, 1, 5])
    letters = tf.ragged.constant([[[1, 2]], [[3], []], [[4]], [[1, 1], [2]], [[5]], [], [[2, 3]]])
    y = np.arange(7, dtype=np.float32)[:, np.newaxis]
    keras.utils.set_random_seed(5)
    with strategy_of(comm).scope():
        model = Own()
        model.compile(keras.optimizers.SGD(0.01), "mse")
    data = tf.data.Dataset.from_tensor_slices(((words, letters), y)).batch(3)
    fit = model.fit(data, epochs=2, verbose=0)
    scores = [model.evaluate(data, verbose=0), model.predict(data, verbose=0)]
    return state_of(model, [*fit.history.values(), *scores])


def by_batches(comm: Any) -> Any:
    """Keras' own function for a batch of each rank's."""
    model = network(comm)
    rank = None if comm.world_size == 1 else comm.rank
    for step in range(len(PARTS)):
        model.train_on_batch(*images(step, rank))
    return state_of(model)


def by_a_loop(comm: Any, has_functions: bool = False) -> Any:
    """As TensorFlow's guide has it: a sum over samples, divided by a number."""
    import keras
    import tensorflow as tf

    # A loop as this one counts what layers add as much on every replica.
    model = network(comm, activity=None)
    strategy = model.distribute_strategy
    if has_functions:
        model.layers[3].call = tf.function(model.layers[3].call)
    with strategy.scope():
        metric = keras.metrics.MeanAbsoluteError()

    def replica_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            predicted = model(x, training=True)
            losses = tf.reduce_sum((predicted - y) ** 2, 1)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=5)
            loss += tf.nn.scale_regularization_loss(model.losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        metric.update_state(y, predicted)
        return loss

    @tf.function  # type: ignore[untyped-decorator]
    def step(x: Any, y: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(replica_step, (x, y)), axis=None)

    data = own_data(comm)
    losses = [float(step(*batch)) for batch in strategy.experimental_distribute_dataset(data)]
    return state_of(model, [*losses, float(metric.result())])


def by_join(comm: Any, normalisation: str | None = None) -> dict[str, Any]:
    """Without a strategy; the moving means after each step are each rank's own there."""
    import tensorflow as tf

    from gradring.tensorflow import GradientReducer, broadcast_variables, join

    model = network(SimpleNamespace(world_size=1), normalisation)
    reduce_gradients = GradientReducer(communicator=comm)
    broadcast_variables(model.variables, communicator=comm)

    @tf.function(reduce_retracing=True)  # type: ignore[untyped-decorator]
    def gradients_of(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        return tape.gradient(loss, model.trainable_variables)

    means = []
    for x, y in join(own_data(comm, has_strategy=False), comm):
        gradients = reduce_gradients(gradients_of(x, y), samples=len(y))
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        means.append([np.asarray(w).tolist() for w in model.non_trainable_variables])
    return {**state_of(model), "means": means}


def logs_of_a_step(comm: Any) -> Any:
    """A program's own `train_step`: its metric, a mean and a vector, of three samples."""
    import keras
    import tensorflow as tf

    class Own(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.end = keras.layers.Dense(1)
            self.mean = keras.metrics.Mean()

        def call(self, x: Any) -> Any:
            return self.end(x)

        def train_step(self, data: Any) -> Any:
            x, _ = data
            self.mean.update_state(tf.reduce_mean(x))  # a NaN without samples
            return {
                "metric": self.mean.result(),
                "mean": tf.reduce_mean(x),
                "columns": tf.reduce_mean(x, axis=0),
            }

    with strategy_of(comm).scope():
        model = Own()
        model.compile("sgd")
    found = []
    for count in (1, 3):
        x = np.arange(2.0 * count, dtype=np.float32).reshape(count, 2)
        history = model.fit(x, x, batch_size=4, shuffle=False, verbose=0).history
        found.append({name: np.asarray(values[0]).tolist() for name, values in history.items()})
    return found


def outputs_of_a_layer(comm: Any) -> Any:
    """What a layer without samples gives its caller, by kind of input and of output."""
    import keras
    import tensorflow as tf

    class Several(keras.layers.Layer):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            self.add_loss(tf.reduce_sum(x))
            return {"rows": x, "gram": tf.transpose(x) @ x, "sum": tf.reduce_sum(x)}

    strategy = strategy_of(comm)
    with strategy.scope():
        layer, embedding = Several(), keras.layers.Embedding(4, 2, mask_zero=True)
        recurrent = keras.layers.LSTM(2)

    def replica_step(x: Any, words: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs = layer(x)
            total = sum(tf.reduce_sum(output) for output in outputs.values())
        embedded = embedding(words)
        return {
            **outputs,
            "loss": layer.losses[0],
            "gradient": tape.gradient(total, x),
            "mask": embedded._keras_mask,
            "recurrent": recurrent(embedded),
        }

    specs = [tf.TensorSpec([None, 3], tf.float32), tf.TensorSpec([None, None], tf.int32)]
    ways = {
        "eager": replica_step,
        "known": tf.function(replica_step),
        "unknown": tf.function(replica_step, input_signature=specs),
    }
    batch, found = (tf.zeros([0, 3]), tf.zeros([0, 0], tf.int32)), {}
    for name, way in ways.items():
        outputs = strategy.run(way, batch)
        found[name] = {
            key: np.asarray(value).tolist() if 0 not in value.shape else list(value.shape)
            for key, value in outputs.items()
        }
    return found


SEQUENCES = {way.__name__: way for way in keras_sequences.WAYS}
WAYS: dict[str, Callable[[Any], Any]] = {
    "by_fit": by_fit,
    "by_fit_eagerly": partial(by_fit, run_eagerly=True),
    "by_fit_of_several_steps": partial(by_fit, steps_per_execution=2),
    "by_fit_of_few_samples": by_fit_of_few_samples,
    "by_fit_of_own_batches": by_fit_of_own_batches,
    "by_fit_of_two_outputs": by_fit_of_two_outputs,
    "by_fit_of_ragged_rows": by_fit_of_ragged_rows,
    "by_batches": by_batches,
    "by_a_loop": by_a_loop,
    # A layer whose `call` is a `tf.function`.
    "by_a_loop_of_functions": partial(by_a_loop, has_functions=True),
    "by_join": by_join,
    **SEQUENCES,
}
#: With a log for each output.
LOGGED_BY_SHAPE = ("by_fit_of_two_outputs", "by_fit_of_masked_outputs")
#: In every run of the tests: `fit` and its logs, a loop, and a training without a strategy; and
#: means over steps.
QUICK_WAYS = (
    "by_fit",
    "by_fit_of_own_batches",
    "by_a_loop",
    "by_join",
    "by_fit_of_masked_outputs",
)


def train_all(ways: list[str], losses: list[str]) -> dict[str, Any]:
    """All of it, in one process of a rank."""
    import gradring

    with gradring.init() as comm:
        found = {name: way(comm) for name, way in WAYS.items() if name in ways}
        found |= {f"{which} losses": of_losses_and_metrics(comm, which) for which in losses}
        found["logs_of_a_step"] = logs_of_a_step(comm)
        if comm.world_size > 1:
            found["means_by_join"] = by_join(comm, "plain")["means"]
            found["outputs_of_a_layer"] = outputs_of_a_layer(comm)
        return found


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest) -> tuple[list[Any], Any]:
    """Two ranks, and one process; with nothing set in the environment, as a user has it."""
    cases = chosen(request, "way"), chosen(request, "which")
    (one,) = run_ranks(train_all, 1, *cases, timeout=600)
    return run_ranks(train_all, 2, *cases, timeout=900), one


def check(found: Any, expected: Any, tolerance: float = 1e-3) -> None:
    """Compares weights and logs."""
    for mine, theirs in zip(found["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=tolerance, atol=2e-2 * tolerance)
    tf_logs = zip(flat(found["logs"]), flat(expected["logs"]), strict=True)
    for mine, theirs in tf_logs:
        assert mine == pytest.approx(theirs, rel=tolerance, abs=1e-2 * tolerance, nan_ok=True)


def flat(logs: Any) -> list[float]:
    """The numbers in dictionaries and lists."""
    if isinstance(logs, dict):
        return flat([logs[name] for name in sorted(logs)])
    if isinstance(logs, list | tuple | np.ndarray):
        return [number for each in logs for number in flat(each)]
    return [float(logs)]


@pytest.mark.timeout(1600)
@pytest.mark.parametrize("way", marked(WAYS, QUICK_WAYS))
def test_two_workers_train_as_one_process(trained: Any, way: str) -> None:
    ranks, one = trained
    tolerance = 2e-5 if way in SEQUENCES else 1e-3
    for rank in ranks:
        if way in LOGGED_BY_SHAPE and KERAS_VERSION >= (3, 16):
            # Keras weighs these logs by the samples only where a trace knows how many these are.
            rank[way]["logs"] = one[way]["logs"]
        check(rank[way], one[way], tolerance)
        for mine, first in zip(rank[way]["weights"], ranks[0][way]["weights"], strict=True):
            assert mine.tobytes() == first.tobytes()


@pytest.mark.parametrize("which", marked(("some", "all"), ("some",)))
def test_losses_and_metrics_are_those_of_one_process(trained: Any, which: str) -> None:
    ranks, one = trained
    for rank in ranks:
        check(rank[f"{which} losses"], one[f"{which} losses"])


def test_a_rank_that_has_ended_keeps_its_moving_means(trained: Any) -> None:
    (first, second), _ = trained
    after_one, *others = second["means_by_join"]
    assert others == [after_one] * (len(PARTS) - 1)
    assert len({str(means) for means in first["means_by_join"]}) == len(PARTS)


def test_a_step_logs_what_one_process_logs(trained: Any) -> None:
    ranks, one = trained
    for rank in ranks:
        assert rank["logs_of_a_step"] == one["logs_of_a_step"]


def test_a_layer_without_samples_gives_no_rows_and_zeros(trained: Any) -> None:
    expected = {
        "rows": [0, 3],
        "gram": np.zeros([3, 3]).tolist(),
        "sum": 0.0,
        "loss": 0.0,
        "gradient": [0, 3],
        "mask": [0, 32],
        "recurrent": [0, 2],
    }
    for rank in trained[0]:
        assert rank["outputs_of_a_layer"] == dict.fromkeys(("eager", "known", "unknown"), expected)
