"""Programs for `given_programs` whose steps gather rows, get none, or read files."""

from __future__ import annotations

import os
import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf

X = np.random.default_rng(0).normal(size=(26, 4)).astype("float32")
Y = X.sum(1, keepdims=True)


def _trained(data: Any, loss: Any = "mse", kind: Any = keras.Sequential, **options: Any) -> Any:
    model = kind([keras.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05), loss)
    history = model.fit(*data, epochs=2, shuffle=False, verbose=0, **options)
    weights = [np.ravel(value).tolist() for value in model.get_weights()]
    return {"weights": weights, "history": history.history}


def rows_that_are_gathered() -> Any:
    def loss(y: Any, p: Any) -> Any:
        places = tf.range(tf.shape(p)[0])
        return tf.reduce_mean(tf.square(tf.gather(p, places) - y))

    return _trained((X[:24], Y[:24]), loss, batch_size=8)


def rows_of_a_function_of_python() -> Any:
    def loss(y: Any, p: Any) -> Any:
        squares = tf.py_function(lambda y, p: tf.square(y - p), [y, p], tf.float32)
        return tf.reduce_mean(squares)

    return _trained((X[:24], Y[:24]), loss, batch_size=8)


class Weighed(keras.Sequential):  # type: ignore[misc]
    """A model that learns the weight of its loss."""

    def build(self, input_shape: Any = None) -> None:
        super().build(input_shape)
        self.balance = self.add_weight(shape=(), initializer="zeros", name="balance")

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            error = tf.reduce_mean(tf.square(self(x) - y))
            loss = tf.exp(-self.balance) * error + self.balance
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"error": error}


def a_learnt_weight_and_ranks_without_samples() -> Any:
    return _trained((X[:25], Y[:25]), kind=Weighed, batch_size=8)


class Derived(keras.Sequential):  # type: ignore[misc]
    """A model whose logs are functions of metrics."""

    def compute_metrics(self, *data: Any, **named: Any) -> Any:
        logs = super().compute_metrics(*data, **named)
        p, r = logs["precision"], logs["recall"]
        found = {"wrong": 1 - p, "both": 2 * p * r / (p + r + 1e-7), "exp": tf.exp(logs["loss"])}
        return {**logs, **found, "inner": {"half": logs["loss"] / 2}}


def losses_of_columns() -> Any:
    def summed(y: Any, p: Any) -> Any:
        return tf.reduce_sum(tf.square(y - p), axis=0)

    def averaged(y: Any, p: Any) -> Any:
        return tf.reduce_mean(tf.square(y - p), axis=0, keepdims=True)

    found = []
    for loss in (summed, averaged):
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(2, kernel_initializer="ones")]
        )
        model.compile(keras.optimizers.SGD(0.01), loss, metrics=[summed, averaged])
        history = model.fit(X, X[:, :2], batch_size=8, epochs=2, shuffle=False, verbose=0).history
        found.append({"history": history, "weights": model.get_weights()[0].tolist()})
    return found


def lines_that_are_shuffled() -> Any:
    path = os.path.join(sys.argv[1], "shuffled.txt")
    np.savetxt(f"{path}.{os.getpid()}", X)
    os.replace(f"{path}.{os.getpid()}", path)
    lines = tf.data.TextLineDataset(path)
    rows = lines.map(lambda line: tf.strings.to_number(tf.strings.split(line)))
    data = rows.map(lambda row: (tf.ensure_shape(row, [4]), tf.reduce_sum(row, keepdims=True)))
    return _trained((data.shuffle(30, seed=1).batch(8),))


def logs_that_are_functions_of_metrics() -> Any:
    model = Derived([keras.Input((4,)), keras.layers.Dense(1, "sigmoid")])
    metrics = [keras.metrics.Precision(name="precision"), keras.metrics.Recall(name="recall")]
    model.compile(keras.optimizers.SGD(0.05), "mse", metrics=metrics)
    data = X, (Y > 0).astype("float32")
    rows = X[:9], data[1][:9]
    history = model.fit(*data, batch_size=8, epochs=2, verbose=0, validation_data=rows).history
    # Keras keeps no history of a dictionary inside of the logs.
    history = {name: values for name, values in history.items() if "inner" not in name}
    logs = model.train_on_batch(*rows, return_dict=True)
    return {"history": history, "logs": [float(logs[name]) for name in ("wrong", "both", "exp")]}


def batches_across_files() -> Any:
    paths = [os.path.join(sys.argv[1], f"{number}.txt") for number in (1, 2)]
    for path, rows in zip(paths, np.split(X, [15]), strict=True):
        np.savetxt(f"{path}.{os.getpid()}", rows)
        os.replace(f"{path}.{os.getpid()}", path)  # all ranks write equal files
    lines = tf.data.TextLineDataset(paths)
    rows = lines.map(lambda line: tf.strings.to_number(tf.strings.split(line)))
    data = rows.map(lambda row: (tf.ensure_shape(row, [4]), tf.reduce_sum(row, keepdims=True)))
    return _trained((data.batch(8),))


ALL = (
    rows_that_are_gathered,
    rows_of_a_function_of_python,
    a_learnt_weight_and_ranks_without_samples,
    losses_of_columns,
    lines_that_are_shuffled,
    logs_that_are_functions_of_metrics,
    batches_across_files,
)
