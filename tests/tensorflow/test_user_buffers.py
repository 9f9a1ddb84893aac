"""Arrays of the program, which Python code in a dataset gives to TensorFlow in slices."""

from typing import Any

import numpy as np
import pytest

from gradring.testing import run_ranks
from support.keras_models import needs_fit

SAMPLES, BATCH, EPOCHS = 48, 12, 5

#: What a dataset is made of.
SOURCES = ("PyDataset", "generator", "from_generator", "from_generator with dtypes", "map")
WAYS = ("fit", "loop", "loop over a dataset of each worker")
#: A loop cannot be over what Keras alone makes a dataset of.
CASES = [(kind, way) for way in WAYS for kind in SOURCES[0 if way == "fit" else 2 :]]
#: Each way, and what Keras, TensorFlow and the program make a dataset of.
QUICK = [(SOURCES[0], WAYS[0]), (SOURCES[2], WAYS[1]), (SOURCES[4], WAYS[2])]


def source(kind: str, x: Any, y: Any) -> Any:
    """Batches that are slices of `x` and `y`."""
    import keras
    import tensorflow as tf

    class Data(keras.utils.PyDataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return SAMPLES // BATCH

        def __getitem__(self, i: int) -> Any:
            return x[i * BATCH : (i + 1) * BATCH], y[i * BATCH : (i + 1) * BATCH]

    data = Data()

    def batches() -> Any:
        return (data[i] for i in range(len(data)))

    def endless() -> Any:
        while True:
            yield from batches()

    if kind == "PyDataset":
        return data
    if kind == "generator":
        return endless()
    specs = (tf.TensorSpec([None, 3], tf.float32), tf.TensorSpec([None, 1], tf.float32))
    if kind == "from_generator":
        return tf.data.Dataset.from_generator(batches, output_signature=specs)
    types, shapes = (tf.float32, tf.float32), ([None, 3], [None, 1])
    if kind == "from_generator with dtypes":
        return tf.data.Dataset.from_generator(batches, types, shapes)

    def batch(i: Any) -> Any:
        parts = tf.numpy_function(lambda i: data[i], [i], types)
        return tuple(
            tf.ensure_shape(part, shape) for part, shape in zip(parts, shapes, strict=True)
        )

    return tf.data.Dataset.range(len(data)).map(batch)


def train(comm: Any, kind: str, way: str) -> dict[str, Any]:
    """How many labels have changed, and the losses of all epochs."""
    import keras

    from gradring.tensorflow import CustomCollectiveStrategy

    x = np.random.default_rng(1).normal(size=(SAMPLES, 3)).astype(np.float32)
    y = x.sum(1, keepdims=True)
    before = x.copy(), y.copy()
    strategy = CustomCollectiveStrategy(communicator=comm)
    with strategy.scope():
        dense = keras.layers.Dense(1, kernel_initializer="zeros")
        model = keras.Sequential([keras.layers.Input((3,)), dense])
        model.compile(keras.optimizers.SGD(0.05), "mse")
    if way == "fit":
        steps = SAMPLES // BATCH if kind == "generator" else None
        losses = model.fit(
            source(kind, x, y), epochs=EPOCHS, steps_per_epoch=steps, shuffle=False, verbose=0
        ).history["loss"]
    else:
        losses = loop(strategy, model, source(kind, x, y), way)
    changed = [int((now != then).sum()) for now, then in zip((x, y), before, strict=True)]
    return {"changed": changed, "losses": losses}


def loop(strategy: Any, model: Any, dataset: Any, way: str) -> list[float]:
    """The same as `fit`, as a custom training loop."""
    import tensorflow as tf

    replicas = strategy.num_replicas_in_sync
    if way == "loop":
        dataset = strategy.experimental_distribute_dataset(dataset)
    else:
        # Each worker slices for itself.
        def part(context: Any) -> Any:
            place, count = context.input_pipeline_id, BATCH // replicas
            rows = slice(place * count, (place + 1) * count)
            return dataset.map(lambda *batch: tuple(column[rows] for column in batch))

        dataset = strategy.distribute_datasets_from_function(part)

    def replica_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((model(x) - y) ** 2) / BATCH
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function  # type: ignore[untyped-decorator]
    def epoch(batches: Any) -> Any:
        total = 0.0
        for batch in batches:
            total += strategy.reduce("SUM", strategy.run(replica_step, batch), axis=None)
        return total / (SAMPLES // BATCH)

    return [float(epoch(dataset)) for _ in range(EPOCHS)]


def train_all(cases: list[tuple[str, str]]) -> dict[tuple[str, str], Any]:
    """By source and way."""
    import gradring

    with gradring.init() as comm:
        return {(kind, way): train(comm, kind, way) for kind, way in cases}


@pytest.fixture(
    scope="module",
    params=[pytest.param(QUICK, id="some"), pytest.param(CASES, id="all", marks=pytest.mark.slow)],
)
def trained(request: pytest.FixtureRequest) -> Any:
    """With nothing set in the environment, as a user has it."""
    return run_ranks(train_all, 2, request.param, timeout=280)


@needs_fit
def test_arrays_of_the_program_stay_as_they_are(trained: Any) -> None:
    for rank, found in enumerate(trained):
        changed = {case: result["changed"] for case, result in found.items()}
        assert not any(map(any, changed.values())), f"rank {rank}: {changed}"


@needs_fit
def test_training_is_that_on_the_arrays(trained: Any) -> None:
    losses = [result["losses"] for found in trained for result in found.values()]
    for each in losses:
        np.testing.assert_allclose(each, losses[0], rtol=1e-4)
    assert losses[0][-1] == pytest.approx(0.1419, abs=1e-4)
