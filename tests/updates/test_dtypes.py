"""Training of variables of several dtypes at once: two workers, two servers, all optimizers."""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
import pytest

from gradring import updates
from gradring.testing import run_ranks
from support.keras_models import needs_fit
from support.served import served
from support.tf_worker import join

pytestmark = needs_fit

WORKERS = 2
STEPS = 4
SHAPES = {"float64": (5, 3), "bfloat16": (7,), "float32": (2, 2), "float16": (3,)}
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {}),
    "SGD momentum": ("SGD", {"momentum": 0.9, "nesterov": True}),
    "RMSprop": ("RMSprop", {}),
    "RMSprop centered": ("RMSprop", {"momentum": 0.5, "epsilon": 1e-3, "centered": True}),
    "Adam": ("Adam", {"epsilon": 1e-3}),
    "Adam amsgrad": ("Adam", {"epsilon": 1e-3, "amsgrad": True}),
    "AdamW": ("AdamW", {"epsilon": 1e-3, "weight_decay": 0.02}),
    "Adadelta": ("Adadelta", {"epsilon": 1e-3}),
    "Adagrad": ("Adagrad", {"epsilon": 1e-3}),
    "Adamax": ("Adamax", {"epsilon": 1e-3}),
    "Nadam": ("Nadam", {"beta_2": 0.9, "epsilon": 1e-3}),
    "Lion": ("Lion", {"weight_decay": 0.004}),
    # Powers of the default are roots, only in graphs.
    "Ftrl": ("Ftrl", {"learning_rate_power": 0.0, "l1_regularization_strength": 0.001}),
}


def job() -> dict[str, Any]:
    with join() as comm:
        alone = {name: trained(None, name, range(WORKERS)) for name in OPTIMIZERS}
        with (
            tempfile.TemporaryDirectory() as snapshots,
            served(comm, updates.ParameterServer(snapshots=snapshots), servers=2) as strategy,
        ):
            pushed = {name: trained(strategy, name, [comm.rank]) for name in OPTIMIZERS}
            rows = by_rows(strategy, comm)
        return {"alone": alone, "served": pushed, "rows": rows}


def gradient(shape: tuple[int, ...], step: int, workers: Any) -> Any:
    """The sum of some workers' gradients, which are exact in each dtype."""
    elements = np.arange(np.prod(shape)).reshape(shape)
    return sum((step * 7 + elements * 5 + worker * 3) % 17 - 8 for worker in workers) / 16


def trained(strategy: Any, name: str, workers: Any) -> list[Any]:
    """The variables after some steps with the summed gradients of workers."""
    import keras
    import tensorflow as tf

    strategy = strategy or tf.distribute.get_strategy()
    kind, options = OPTIMIZERS[name]
    with strategy.scope():
        variables = [
            tf.Variable(tf.cast(np.linspace(-1, 1, np.prod(shape)).reshape(shape), dtype))
            for dtype, shape in SHAPES.items()
        ]
        optimizer = getattr(keras.optimizers, kind)(0.1, **options)
        optimizer.build(variables)

    def step(number: int) -> None:
        pairs = [
            (tf.cast(gradient(shape, number, workers), dtype), variable)
            for (dtype, shape), variable in zip(SHAPES.items(), variables, strict=True)
        ]
        strategy.run(lambda: optimizer.apply_gradients(pairs))

    for number in range(STEPS):
        step(number)
    return [variable.numpy() for variable in variables]


def by_rows(strategy: Any, comm: Any) -> Any:
    """Tables of each dtype in graphs, of which each step changes some rows."""
    import keras
    import tensorflow as tf

    with strategy.scope():
        tables = [tf.Variable(tf.zeros([64, 1], dtype), name=dtype) for dtype in SHAPES]
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build(tables)

    def replica_step(words: Any) -> None:
        with tf.GradientTape() as tape:
            losses = [tf.reduce_sum(tf.gather(table, words)) for table in tables]
            loss = tf.add_n([tf.cast(each, tf.float64) for each in losses])
        gradients = tape.gradient(loss, tables)
        optimizer.apply_gradients(zip(gradients, tables, strict=True))

    @tf.function  # type: ignore[untyped-decorator]
    def step(words: Any) -> None:
        strategy.run(replica_step, args=(words,))

    expected = np.zeros([64, 1])
    for number in range(6):
        step(tf.constant([number, number, 9 * comm.rank + 1]))
        for rank in range(WORKERS):
            np.subtract.at(expected, [number, number, 9 * rank + 1], 1)
    return [np.array_equal(table.numpy(), expected.astype(table.numpy().dtype)) for table in tables]


@pytest.fixture(scope="module")
def ranks() -> Any:
    return run_ranks(job, WORKERS, timeout=280)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_variables_of_each_dtype_have_the_bits_of_keras_in_one_process(
    ranks: Any, name: str
) -> None:
    for rank in ranks:
        pairs = zip(rank["served"][name], rank["alone"][name], strict=True)
        for ours, theirs in pairs:
            assert (ours.dtype, ours.tobytes()) == (theirs.dtype, theirs.tobytes())


def test_rows_of_each_dtype_arrive(ranks: Any) -> None:
    assert [rank["rows"] for rank in ranks] == [[True] * len(SHAPES)] * WORKERS
