"""The same training by one process, and how far rounding carries it.

A `BatchNormalization` that is not synchronised normalises each rank's part of a batch by itself.
One process does what two ranks do if it takes the parts one after the other, each with the moving
statistics of before, and goes on with the means. So also where sums over a batch are rounded to 16
bits, because those over its parts are rounded elsewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from real_models.real_model import RealModel
from real_models.ways import Way, plain, scaled

RANKS = 2


class Alone:
    """A model that one process trains on the whole batches."""

    def __init__(self, real: RealModel, way: Way, model: Any, optimizers: list[Any]) -> None:
        import tensorflow as tf

        self._real, self._way = real, way
        self.model, self._optimizers = model, optimizers
        self._parts = RANKS if way.by_parts or is_computed_by_parts(model) else 1
        self._gradients = tf.function(self._find_gradients)
        self._apply = tf.function(self._apply_mean)
        self._fresh = [[tf.identity(v.value) for v in o.variables] for o in optimizers]

    def train(self, weights: list[Any], x: Any, y: Any) -> list[Any]:
        """Trains from these weights; returns those at the end."""
        import tensorflow as tf

        self.model.set_weights(weights)
        for optimizer, fresh in zip(self._optimizers, self._fresh, strict=True):
            for variable, value in zip(optimizer.variables, fresh, strict=True):
                variable.assign(value)
        for batch in tf.data.Dataset.from_tensor_slices((x, y)).batch(self._real.batch):
            self._take_step(batch)
        return [np.asarray(weight) for weight in self.model.get_weights()]

    def _take_step(self, batch: Any) -> None:
        import tensorflow as tf

        rows = self._real.batch // self._parts
        batches = [
            tf.nest.map_structure(lambda t, i=i: t[i * rows : (i + 1) * rows], batch)
            for i in range(self._parts)
        ]
        statistics = [v for v in self.model.non_trainable_variables if "float" in v.dtype]
        for index in range(len(self._optimizers)):
            before = [tf.identity(v.value) for v in statistics]
            gradients, after = [], []
            for x, y in batches:
                for variable, value in zip(statistics, before, strict=True):
                    variable.assign(value)
                gradients.append(self._gradients(index, x, y))
                after.append([tf.identity(v.value) for v in statistics])
            for variable, *values in zip(statistics, *after, strict=True):
                variable.assign(tf.add_n(values) / len(values))
            self._apply(index, gradients)

    def _find_gradients(self, index: int, x: Any, y: Any) -> list[Any]:
        loss_of, weights = self._real.parts_of(self.model, x, y)[index]
        scale = functools.partial(scaled, self._optimizers[index], 1 / self._parts)
        _, found = (self._way.gradients or plain)(loss_of, weights, scale)
        return list(found)

    def _apply_mean(self, index: int, gradients: list[list[Any]]) -> None:
        _, weights = self._real.parts_of(self.model, None, None)[index]
        total = [_added(each) for each in zip(*gradients, strict=True)]
        self._optimizers[index].apply_gradients(zip(total, weights, strict=True))


def _added(parts: Sequence[Any]) -> Any:
    """The sum of gradients; rows of embeddings follow each other."""
    import tensorflow as tf

    if not isinstance(parts[0], tf.IndexedSlices):
        return tf.add_n(parts)
    values, indices = (
        tf.concat([getattr(p, name) for p in parts], 0) for name in ("values", "indices")
    )
    return tf.IndexedSlices(values, indices, parts[0].dense_shape)


def is_computed_by_parts(model: Any) -> bool:
    """Whether each rank's part of a batch gives something that the whole would not give."""
    import keras

    layers = model._flatten_layers()
    normalised = [x for x in layers if isinstance(x, keras.layers.BatchNormalization)]
    if normalised:
        return not all(layer.synchronized for layer in normalised)
    return keras.config.dtype_policy().compute_dtype in ("float16", "bfloat16")


def disturbed(weights: list[Any], precision: float) -> list[Any]:
    """The weights, each changed by at most one rounding."""
    draw = np.random.default_rng(1)
    return [
        weight * (1 + precision * draw.uniform(-1, 1, weight.shape)).astype(weight.dtype)
        if weight.dtype.kind == "f"
        else weight
        for weight in weights
    ]


def distance(ours: list[Any], theirs: list[Any]) -> float:
    """The largest difference of two elements."""
    # Unlike Python's max, numpy's lets a NaN win.
    return float(
        np.max(
            [
                np.max(np.abs(a.astype(np.float64) - b), initial=0)
                for a, b in zip(ours, theirs, strict=True)
            ]
        )
    )
