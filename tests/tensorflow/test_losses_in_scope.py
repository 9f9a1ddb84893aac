"""Losses that a program of a strategy's scope computes: trained as in one process, or named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gradring.testing import run_ranks
from support.keras_models import needs_fit
from support.log_lines import kept_lines
from support.tf_worker import join

#: The last batch has one sample less on the last rank.
SAMPLES, BATCH, COLUMNS = 43, 8, 4
#: What is said of a loss that the ranks' parts of a batch do not give, by the loss.
NAMED = {
    "pairs": "a loss is, as far as its graph tells, neither a mean nor a sum",
    "root": "a loss is no linear function",
    "own step": "a loss is, as far as its graph tells, neither a mean nor a sum",
    "weights by counts": "a loss is divided by a sum over data",
    "sum of a layer, eager": "add_loss got a scalar in an eager step",
}
EQUAL = (
    *("squares", "none", "own sum", "gathered pairs", "penalty of weights, eager"),
    *("sum of a layer", "rows of a layer", "rows of a layer, eager"),
)


def losses() -> dict[str, Any]:
    import keras
    import tensorflow as tf
    from keras import ops

    from gradring.tensorflow import all_gather

    def similarities(y: Any, p: Any, all_y: Any) -> Any:
        logits = ops.matmul(p, ops.transpose(all_y))
        return ops.mean(ops.square(logits), axis=1)

    def gathered(y: Any, p: Any) -> Any:
        return similarities(y, p, all_gather(tf.convert_to_tensor(y)))

    squares = keras.losses.MeanSquaredError
    return {
        "squares": squares(),
        "none": squares(reduction="none"),
        "sum of a layer": squares(),
        "rows of a layer": squares(),
        "rows of a layer, eager": squares(),
        "sum of a layer, eager": squares(),
        "penalty of weights, eager": squares(),
        "own sum": squares(reduction="sum"),
        "weights by counts": squares(reduction="sum"),
        "masked normalisation": squares(),
        "pairs": lambda y, p: similarities(y, p, y),
        "gathered pairs": gathered,
        "root": lambda y, p: ops.sqrt(ops.mean(ops.square(y - p))),
        "own step": None,
    }


def trained() -> dict[str, Any]:
    """For each loss, weights, logs of two epochs, and what gradring says."""
    import keras
    import tensorflow as tf

    from gradring.tensorflow import CustomCollectiveStrategy

    said = kept_lines()

    class Penalty(keras.layers.Layer):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            rows = 1e-2 * keras.ops.sum(keras.ops.square(x), axis=1)
            self.add_loss(rows if self.name == "rows" else keras.ops.sum(rows))
            return x

    class Own(keras.Model):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                p = self(x, training=True)
                loss = tf.reduce_mean(tf.square(tf.matmul(p, y, transpose_b=True)))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    class Detector(keras.Model):  # type: ignore[misc]
        def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any, **more: Any) -> Any:
            hits = keras.ops.sum(keras.ops.cast(y > 0, "float32"))
            weights = keras.ops.ones_like(y[:, 0]) / keras.ops.maximum(hits, 1.0)
            return super().compute_loss(x, y, y_pred, weights, **more)

    kinds = {"own step": Own, "weights by counts": Detector}

    from gradring.tensorflow.graph import once

    numbers = np.random.default_rng(0)
    x = numbers.normal(size=(SAMPLES, COLUMNS)).astype("float32")
    found = {}
    with join() as comm:
        strategy = CustomCollectiveStrategy(communicator=comm)
        for name, loss in losses().items():
            said.clear()
            # Each kind is named once in a process.
            once.forget()
            keras.utils.set_random_seed(0)
            # All in one order, which depends on the number of iterators that are made.
            data = tf.data.Dataset.from_tensor_slices((x, x)).shuffle(SAMPLES, seed=3).batch(BATCH)
            with strategy.scope():
                inputs = keras.Input((COLUMNS,))
                penalty = "l2" if name.startswith("penalty") else None
                hidden = keras.layers.Dense(3, kernel_regularizer=penalty)(inputs)
                if name == "masked normalisation":
                    steps = keras.layers.Masking()(keras.layers.Reshape((3, 1))(hidden))
                    hidden = keras.layers.Flatten()(keras.layers.BatchNormalization()(steps))
                if "of a layer" in name:
                    hidden = Penalty(name=name.partition(" ")[0])(hidden)
                kind = kinds.get(name, keras.Model)
                model = kind(inputs, keras.layers.Dense(COLUMNS)(hidden))
                model.compile(keras.optimizers.SGD(1e-3), loss, run_eagerly="eager" in name)
            logs = model.fit(data, epochs=2, verbose=0).history["loss"]
            weights = [np.asarray(weight) for weight in model.get_weights()]
            found[name] = {"weights": weights, "logs": logs, "said": [*said]}
    return found


@pytest.fixture(scope="module")
def found() -> tuple[Any, Any, Any]:
    (alone,) = run_ranks(trained, 1, timeout=300)
    first, second = run_ranks(trained, 2, timeout=300)
    return alone, first, second


@needs_fit
@pytest.mark.parametrize("loss", EQUAL)
def test_weights_and_logs_are_those_of_one_process(found: Any, loss: str) -> None:
    alone, *ranks = (each[loss] for each in found)
    for rank in ranks:
        np.testing.assert_allclose(rank["logs"], alone["logs"], rtol=2e-6)
        for one, other in zip(rank["weights"], alone["weights"], strict=True):
            np.testing.assert_allclose(one, other, atol=2e-6)
        assert rank["said"] == []


@needs_fit
@pytest.mark.parametrize("loss", NAMED)
def test_losses_of_whole_batches_are_named_by_rank_0(found: Any, loss: str) -> None:
    alone, first, second = (each[loss]["said"] for each in found)
    (named,) = (line for line in first if NAMED[loss] in line)
    assert "2 replicas" in named
    assert not alone
    assert not second


@needs_fit
def test_batch_normalisation_with_a_mask_is_not_named(found: Any) -> None:
    for each in found:
        assert each["masked normalisation"]["said"] == []
