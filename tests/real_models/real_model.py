"""A model of the catalogue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Samples = Callable[[np.random.Generator, int], tuple[Any, Any]]
Part = tuple[Callable[[], Any], Sequence[Any]]
"""A loss, and the variables that one optimizer updates by it."""


@dataclass(frozen=True)
class RealModel:
    """A model, and on what it is trained.

    Attributes:
        build: Makes the Keras model; no layer of it drops anything, so that one process can repeat
            what two have done.
        samples: Makes inputs and labels; all arrays have one row for each sample.
        loss: "classes" (sparse categorical cross-entropy of logits), "values" (mean squared error),
            or "own": the model has its losses in itself.
        batch: Samples of all ranks in a step.
        learning_rate: Of SGD with momentum.
        parts: What is minimised in a step, if not `loss` alone.
    """

    build: Callable[[], Any]
    samples: Samples
    loss: str = "classes"
    batch: int = 8
    learning_rate: float = 0.01
    parts: Callable[[Any, Any, Any], list[Part]] | None = None

    def parts_of(self, model: Any, x: Any, y: Any) -> list[Part]:
        """What is minimised in a step, one after the other, as means over the samples."""
        if self.parts is not None:
            return self.parts(model, x, y)
        return [(lambda: self._mean_loss(model, x, y), model.trainable_variables)]

    def _mean_loss(self, model: Any, x: Any, y: Any) -> Any:
        import keras
        import tensorflow as tf

        predicted = tf.cast(model(x, training=True), keras.config.floatx())
        losses = list(model.losses)
        if self.loss == "classes":
            each = keras.losses.sparse_categorical_crossentropy(y, predicted, from_logits=True)
            losses.append(tf.reduce_mean(each))
        if self.loss == "values":
            losses.append(tf.reduce_mean(keras.losses.mean_squared_error(y, predicted)))
        return tf.add_n([tf.cast(loss, keras.config.floatx()) for loss in losses])

    def compiled_loss(self) -> Any:
        """The same for `compile`."""
        import keras

        return {
            "classes": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            "values": keras.losses.MeanSquaredError(),
            "own": None,
        }[self.loss]


def images(side: int, channels: int = 3, classes: int = 10) -> Samples:
    """Square images, and their classes."""
    return arrays((side, side, channels), classes)


def arrays(shape: tuple[int, ...], classes: int = 10) -> Samples:
    """Arrays of numbers, and their classes."""

    def samples(draw: np.random.Generator, count: int) -> tuple[Any, Any]:
        return draw.normal(size=(count, *shape)), draw.integers(0, classes, count)

    return samples


def words(vocabulary: int, length: int, classes: int = 10, padded: bool = False) -> Samples:
    """Texts of word numbers from 1, filled up with 0 if `padded`; and their classes."""

    def samples(draw: np.random.Generator, count: int) -> tuple[Any, Any]:
        texts = draw.integers(1, vocabulary, (count, length)).astype(np.int32)
        if padded:
            texts *= np.arange(length) < draw.integers(length // 2, length, (count, 1))
        return texts, draw.integers(0, classes, count)

    return samples
