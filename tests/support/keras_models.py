"""Models, data and the two ways of training them that the Keras tests share."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from support.versions import KERAS, installed

#: Divisible by two and by three workers.
BATCH = 24
STEPS = 12
MODELS = ("mlp", "synchronised BN", "embedding", "mixed precision")
OPTIMIZERS = ("SGD momentum", "Adam", "AdamW")

KERAS_VERSION = tuple(int(part) for part in installed(KERAS).split(".")[:2])
#: Older versions are refused by `compat_keras.py`.
CAN_FIT = KERAS_VERSION >= (3, 10)
HAS_MULTI_OPTIMIZER = KERAS_VERSION >= (3, 15)
needs_fit = pytest.mark.skipif(not CAN_FIT, reason="needs Keras 3.10")


def strategy_of(comm: Any) -> Any:
    """Ours for several ranks; a single rank is the oracle and has none."""
    import tensorflow as tf

    from gradring.tensorflow import CustomCollectiveStrategy

    if comm.world_size == 1:
        return tf.distribute.get_strategy()
    return CustomCollectiveStrategy(communicator=comm)


def make_model(kind: str) -> Any:
    """A classifier of eight features, or of four words, into three classes."""
    import keras

    # Adam would amplify the rounding of a bias whose gradient is zero, so none before BN.
    hidden = {
        "mlp": [keras.layers.Dense(16, activation="tanh")],
        "synchronised BN": [
            keras.layers.Dense(16, use_bias=False),
            keras.layers.BatchNormalization(synchronized=True),
            keras.layers.Activation("tanh"),
        ],
        "plain BN": [
            keras.layers.Dense(16, use_bias=False),
            keras.layers.BatchNormalization(momentum=0.8),
            keras.layers.Activation("tanh"),
        ],
        "embedding": [keras.layers.Embedding(20, 8), keras.layers.Flatten()],
        "mixed precision": [keras.layers.Dense(16, activation="tanh", dtype="mixed_float16")],
    }[kind]
    words = kind == "embedding"
    inputs = keras.layers.Input((4,), dtype="int32") if words else keras.layers.Input((8,))
    return keras.Sequential([inputs, *hidden, keras.layers.Dense(3)])


def make_optimizer(name: str, **options: Any) -> Any:
    """Any more `options` go to the optimizer's constructor."""
    import keras

    make: dict[str, Callable[[], Any]] = {
        "SGD": lambda: keras.optimizers.SGD(0.05, **options),
        "SGD momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9, **options),
        "Adam": lambda: keras.optimizers.Adam(0.01, **options),
        "AdamW": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.02, **options),
        "RMSprop": lambda: keras.optimizers.RMSprop(
            0.001, momentum=0.5, epsilon=1e-3, centered=True, **options
        ),
        "Nadam": lambda: keras.optimizers.Nadam(0.01, **options),
        "Ftrl": lambda: keras.optimizers.Ftrl(0.05, l1_regularization_strength=0.001, **options),
    }
    return make[name]()


def samples(words: bool = False, count: int = STEPS * BATCH) -> tuple[Any, Any]:
    """The same inputs and labels on every rank."""
    draw = np.random.default_rng(0)
    if words:
        x = draw.integers(0, 20, size=(count, 4)).astype(np.int32)
    else:
        x = draw.normal(size=(count, 8)).astype(np.float32)
    return x, draw.integers(0, 3, size=count)


def dataset(words: bool = False, count: int = STEPS * BATCH) -> Any:
    """`samples` in batches of the global size."""
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(samples(words, count)).batch(BATCH)


def compiled(strategy: Any, kind: str, optimizer: str, run: Any = None, **options: Any) -> Any:
    """A compiled model; `run` has more arguments of `compile`."""
    import keras

    with strategy.scope():
        model = make_model(kind)
        chosen = make_optimizer(optimizer, **options)
        if kind == "mixed precision":
            chosen = keras.optimizers.LossScaleOptimizer(chosen)
        model.compile(
            chosen,
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            **(run or {}),
        )
    return model


def train_by_fit(
    strategy: Any, kind: str, optimizer: str, run: Any = None, data: Any = None, **options: Any
) -> Any:
    """`model.fit`; returns what a test compares."""
    model = compiled(strategy, kind, optimizer, run, **options)
    history = model.fit(data or dataset(kind == "embedding"), verbose=0).history
    return {**state_of(model, model.optimizer), "logs": history}


def train_by_loop(strategy: Any, kind: str, optimizer: str, **options: Any) -> Any:
    """The usual custom training loop; returns what a test compares."""
    import keras
    import tensorflow as tf

    with strategy.scope():
        model = make_model(kind)
        chosen = make_optimizer(optimizer, **options)
        if kind == "mixed precision":
            chosen = keras.optimizers.LossScaleOptimizer(chosen)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")

    def replica_step(batch: Any) -> Any:
        x, y = batch
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True)) / BATCH
            scaled = chosen.scale_loss(loss)
        gradients = tape.gradient(scaled, model.trainable_variables)
        chosen.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function  # type: ignore[untyped-decorator]
    def step(batch: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(replica_step, args=(batch,)), axis=None)

    batches = strategy.experimental_distribute_dataset(dataset(kind == "embedding"))
    losses = [float(step(batch)) for batch in batches]
    return {**state_of(model, chosen), "logs": {"loss": losses}}


def state_of(model: Any, optimizer: Any) -> Any:
    """Weights and optimizer state as arrays."""
    return {
        "weights": [np.asarray(weight) for weight in model.get_weights()],
        "optimizer": [np.asarray(variable) for variable in optimizer.variables],
    }


def assert_trained_alike(workers: Any, alone: Any, atol: float) -> None:
    """Workers have the same bits; `alone` differs by rounding."""
    first, *others = workers
    for part in ("weights", "optimizer"):
        for other in others:
            for mine, theirs in zip(first[part], other[part], strict=True):
                assert mine.tobytes() == theirs.tobytes(), f"{part} differ between the workers"
        for ours, expected in zip(first[part], alone[part], strict=True):
            np.testing.assert_allclose(ours, expected, rtol=0, atol=atol, err_msg=part)
    for other in others:
        assert first["logs"] == other["logs"]
    assert first["logs"].keys() == alone["logs"].keys()
    for name, values in alone["logs"].items():
        np.testing.assert_allclose(first["logs"][name], values, atol=atol, err_msg=name)
