"""Programs of Keras 3 that know of no replicas: what each prints is the same in one process.

``python given_programs.py DIRECTORY`` trains all of them and prints what they tell, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Any

import given_rows
import keras
import numpy as np
import tensorflow as tf

tf.config.threading.set_inter_op_parallelism_threads(1)
X = np.random.default_rng(0).normal(size=(80, 4)).astype("float32")
Y = X.sum(1, keepdims=True)
PROGRAMS: dict[str, Any] = {}


def program(function: Any) -> Any:
    PROGRAMS[function.__name__] = function
    return function


def dense(units: Any = 1, **kwargs: Any) -> Any:
    return keras.layers.Dense(units, **kwargs)


def functional(kind: Any = keras.Model, *layers: Any, width: Any = 4) -> Any:
    inputs = outputs = keras.Input((width,))
    for layer in layers or (dense(3, activation="tanh"), dense()):
        outputs = layer(outputs)
    return kind(inputs, outputs)


def told(model: Any, history: Any = None, **more: Any) -> Any:
    return {
        "weights": [np.ravel(value).tolist() for value in model.get_weights()],
        "history": history and history.history,
        **more,
    }


class Own(keras.Model):  # type: ignore[misc]
    """A step of its own, by `loss_of`."""

    def train_step(self, data: Any) -> Any:
        x, y, *_ = data  # `train_on_batch` has weights, too
        with tf.GradientTape() as tape:
            loss = self.loss_of(y, self(x, training=True))
        gradients = self.changed(tape.gradient(loss, self.trainable_variables))
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        parts = [loss] if tf.is_tensor(loss) else [tf.reduce_sum(each) for each in loss]
        return {"loss": tf.add_n(parts), **self.logs(gradients)}

    def changed(self, gradients: Any) -> Any:
        return gradients

    def logs(self, gradients: Any) -> Any:
        return {}


def own(loss_of: Any, **methods: Any) -> Any:
    kind = type("Model", (Own,), {"loss_of": staticmethod(loss_of), **methods})
    model = functional(kind)
    model.compile(keras.optimizers.SGD(0.01))
    # 80 samples in batches of 12: the last has 8, and three ranks have 3, 3 and 2 of them.
    return told(model, model.fit(X, Y, batch_size=12, epochs=2, shuffle=False, verbose=0))


@program
def a_mean_of_its_own() -> Any:
    return own(lambda y, p: tf.reduce_mean(tf.square(y - p)))


@program
def a_sum_of_its_own() -> Any:
    return own(lambda y, p: tf.reduce_sum(tf.square(y - p)))


@program
def a_loss_of_each_sample() -> Any:
    return own(lambda y, p: tf.reduce_sum(tf.square(y - p), axis=-1))


@program
def a_sum_divided_by_a_constant() -> Any:
    return own(lambda y, p: tf.reduce_sum(tf.square(y - p)) / 12.0)


@program
def a_sum_divided_by_the_samples() -> Any:
    return own(lambda y, p: tf.reduce_sum((y - p) ** 2) / tf.cast(tf.shape(y)[0], tf.float32))


@program
def an_average_over_replicas() -> Any:
    return own(lambda y, p: tf.nn.compute_average_loss(tf.reduce_sum((y - p) ** 2, -1)))


@program
def a_sum_of_keras() -> Any:
    return own(lambda y, p: keras.losses.MeanSquaredError(reduction="sum")(y, p))


@program
def clipping_in_the_step() -> Any:
    return own(
        lambda y, p: tf.reduce_mean(tf.square(y - p)),
        changed=lambda self, gradients: tf.clip_by_global_norm(gradients, 0.5)[0],
        logs=lambda self, gradients: {"norm": tf.linalg.global_norm(gradients)},
    )


def positions(length: int | None) -> Any:
    """Embeddings of words, and of positions, which are the same for all samples."""
    words = np.random.default_rng(1).integers(0, 5, (80, 6))
    inputs = keras.Input((length,), dtype="int32")
    places = keras.ops.arange(keras.ops.shape(inputs)[1]) if length else None

    class Places(keras.layers.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.table = keras.layers.Embedding(8, 3)

        def call(self, x: Any) -> Any:
            return self.table(keras.ops.arange(0, keras.ops.shape(x)[-1], 1))

    of_places = keras.layers.Embedding(8, 3)(places) if length else Places()(inputs)
    outputs = dense()(keras.ops.mean(keras.layers.Embedding(5, 3)(inputs) + of_places, axis=1))
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.Adam(0.02), "mse")
    return told(model, model.fit(words, Y, batch_size=12, epochs=2, shuffle=False, verbose=0))


@program
def an_embedding_of_positions() -> Any:
    return positions(6)


@program
def an_embedding_of_positions_of_any_length() -> Any:
    return positions(None)


@program
def eagerly() -> Any:
    model = functional(type("Model", (Own,), {"loss_of": lambda _, y, p: tf.reduce_mean(y - p)}))
    model.compile(keras.optimizers.SGD(0.01), run_eagerly=True)
    return told(model, model.fit(X, Y, batch_size=40, shuffle=False, verbose=0))


@program
def a_loss_that_is_called() -> Any:
    class Loss(keras.losses.Loss):  # type: ignore[misc]
        def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            return tf.reduce_mean(tf.square(y_true - y_pred))

    model = functional()
    model.compile(keras.optimizers.SGD(0.1), Loss())
    return told(model, model.fit(X, Y, batch_size=12, shuffle=False, verbose=0))


@program
def a_sum_by_a_function() -> Any:
    model = functional()
    model.compile(keras.optimizers.SGD(0.01), lambda y, p: tf.reduce_sum(tf.square(y - p)))
    return told(model, model.fit(X, Y, batch_size=12, shuffle=False, verbose=0))


class Added(keras.layers.Layer):  # type: ignore[misc]
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind
        self.w = self.add_weight(shape=(4,), initializer="ones")

    def call(self, x: Any) -> Any:
        y = x * self.w
        losses = {
            "weights": lambda: tf.reduce_sum(tf.square(self.w)),
            "mean": lambda: tf.reduce_mean(tf.square(y)),
            "sum": lambda: tf.reduce_sum(tf.square(y)),
            "each": lambda: tf.reduce_sum(tf.square(y), axis=-1),
        }
        self.add_loss(0.1 * losses[self.kind]())
        return y


@program
def losses_of_layers() -> Any:
    found = {}
    for kind in ("weights", "mean", "sum", "each"):
        model = functional(keras.Model, Added(kind), dense(activity_regularizer="l2"))
        model.compile(keras.optimizers.SGD(0.01), "mse")
        history = model.fit(X, Y, batch_size=12, epochs=2, shuffle=False, verbose=0)
        found[kind] = told(model, history)
    return found


@program
def losses_and_weights() -> Any:
    model = functional()
    model.compile(
        keras.optimizers.Adam(0.01, clipnorm=0.1),
        loss="mae",
        metrics=["mse", keras.metrics.RootMeanSquaredError()],
        weighted_metrics=["mae"],
    )
    weights = np.linspace(0.1, 2, len(X)).astype("float32")
    history = model.fit(X, Y, batch_size=12, sample_weight=weights, shuffle=False, verbose=0)
    return told(model, history, evaluated=model.evaluate(X, Y, verbose=0))


@program
def metrics_that_are_no_means() -> Any:
    model = functional(keras.Model, dense(1, activation="sigmoid"))
    names = [keras.metrics.AUC(), keras.metrics.Precision(), keras.metrics.R2Score()]
    model.compile("sgd", "binary_crossentropy", metrics=names)
    labels = (Y > 0).astype("float32")
    history = model.fit(X, labels, batch_size=12, shuffle=False, verbose=0)
    logs = [model.train_on_batch(X[:13], labels[:13]), model.test_on_batch(X, labels)]
    return told(model, history, on_batch=logs)


@program
def batches_one_by_one() -> Any:
    model = functional()
    model.compile(keras.optimizers.SGD(0.05), "mse")
    losses = [float(model.train_on_batch(X[i : i + 7], Y[i : i + 7])) for i in range(0, 70, 7)]
    losses.append(float(model.train_on_batch(X[:1], Y[:1])))  # fewer samples than ranks
    shape = np.shape(model.predict_on_batch(X[:8]))
    return told(model, losses=losses, predicted=shape, each=model.predict(X, verbose=0).tolist())


@program
def accumulation_and_scaling() -> Any:
    model = functional()
    inner = keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)
    model.compile(keras.optimizers.LossScaleOptimizer(inner), "mse")
    return told(model, model.fit(X, Y, batch_size=12, epochs=2, shuffle=False, verbose=0))


@program
def several_optimizers_of_keras() -> Any:
    if not hasattr(keras.optimizers, "MultiOptimizer"):  # before 3.15
        return None
    of_first = keras.optimizers.SGD(0.05, momentum=0.9, use_ema=True)
    maps = keras.optimizers.OptimizerMap(keras.optimizers.Adam(0.01), {".*first.*": of_first})
    model = functional(keras.Model, dense(3, name="first"), dense())
    model.compile(keras.optimizers.MultiOptimizer(maps), "mse")
    swapped = [keras.callbacks.SwapEMAWeights()]
    history = model.fit(X, Y, batch_size=12, epochs=2, shuffle=False, verbose=0, callbacks=swapped)
    return told(model, history)


@program
def two_networks() -> Any:
    class Gan(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.g, self.d = functional(), functional(width=1)

        def compile(self, g: Any, d: Any) -> None:
            super().compile()
            self.of_g, self.of_d = g, d

        def train_step(self, x: Any) -> Any:
            for _ in range(2):
                with tf.GradientTape() as tape:
                    made = self.g(x)
                    real = tf.reduce_sum(x, 1, keepdims=True)
                    with tf.GradientTape() as inner:
                        inner.watch(made)
                        found = self.d(made)
                    slope = inner.gradient(found, made)
                    penalty = tf.reduce_mean((tf.norm(slope, axis=1) - 1) ** 2)
                    loss = tf.reduce_mean(found) - tf.reduce_mean(self.d(real)) + penalty
                weights = self.d.trainable_variables
                self.of_d.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            with tf.GradientTape() as tape:
                of_g = -tf.reduce_mean(self.d(self.g(x)))
            weights = self.g.trainable_variables
            self.of_g.apply_gradients(zip(tape.gradient(of_g, weights), weights, strict=True))
            return {"d": loss, "g": of_g}

    model = Gan()
    model.compile(keras.optimizers.SGD(0.01), keras.optimizers.SGD(0.05))
    return told(model, model.fit(X, batch_size=16, epochs=2, shuffle=False, verbose=0))


@program
def gradients_of_gradients() -> Any:
    """A step on weights that a step was taken from, as of MAML."""

    class Maml(Own):
        def train_step(self, data: Any) -> Any:
            x, y = data
            w, b = self.trainable_variables
            with tf.GradientTape() as outer:
                with tf.GradientTape() as inner:
                    loss = tf.reduce_mean((x @ w + b - y) ** 2)
                of_w, of_b = inner.gradient(loss, [w.value, b.value])
                after = tf.reduce_mean((x @ (w - 0.1 * of_w) + b - 0.1 * of_b - y) ** 2)
            gradients = outer.gradient(after, [w, b])
            self.optimizer.apply_gradients(zip(gradients, [w, b], strict=True))
            return {"loss": loss, "after": after}

    model = functional(Maml, dense())
    model.compile(keras.optimizers.SGD(0.05))
    return told(model, model.fit(X, Y, batch_size=12, epochs=2, shuffle=False, verbose=0))


@program
def gradients_of_no_tape() -> Any:
    class Hebb(Own):
        def train_step(self, data: Any) -> Any:
            x, y = data
            (w,) = self.trainable_variables
            error = x @ w - y
            gradient = tf.linalg.matmul(x, error, transpose_a=True) / tf.cast(
                tf.shape(x)[0], tf.float32
            )
            self.optimizer.apply_gradients([(gradient, w)])
            return {"loss": tf.reduce_mean(error)}

    model = functional(Hebb, dense(use_bias=False))
    model.compile(keras.optimizers.SGD(0.05))
    return told(model, model.fit(X, Y, batch_size=12, epochs=2, shuffle=False, verbose=0))


class Steps(keras.Model):  # type: ignore[misc]
    """Steps that take no gradient of a loss by variables alone."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        (w,) = self.trainable_variables
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_mean(tf.square(x @ w - y))
        x += 5.0 * tape.gradient(loss, x)
        error = x @ w - y
        self.total.update_state(tf.reduce_sum(tf.square(error)))
        # A sum over samples, without a tape.
        self.optimizer.apply_gradients([(tf.matmul(x, error, transpose_a=True), w)])
        right = tf.abs(error) < 1.0
        number = tf.math.count_nonzero(right, dtype=tf.int16)
        counts = {"right": number, "rows": tf.shape(x)[0]}
        return {"loss": tf.reduce_mean(error), "total": self.total.result(), **counts}


@program
def sums_without_a_tape() -> Any:
    model = functional(Steps, dense(use_bias=False))
    model.total = keras.metrics.Mean(name="total")
    model.compile(keras.optimizers.SGD(0.001))
    return told(model, model.fit(X, Y, batch_size=12, epochs=2, shuffle=False, verbose=0))


@program
def sums_by_a_metric_function() -> Any:
    def wrong(y: Any, p: Any) -> Any:
        return tf.reduce_sum(tf.cast(tf.abs(y - p) > 1.0, tf.float32))

    model = functional()
    model.compile(keras.optimizers.SGD(0.05), "mse", metrics=[wrong])
    return told(model, model.fit(X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0))


@program
def functions_in_a_step() -> Any:
    """Of which each is traced once, and takes uneven parts of a batch."""

    class Inner(Own):
        @tf.function  # type: ignore[untyped-decorator]
        def gradients(self, x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
            return loss, tape.gradient(loss, [w.value for w in self.trainable_variables])

        def train_step(self, data: Any) -> Any:
            loss, gradients = self.gradients(*data)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    model = functional(Inner)
    model.compile(keras.optimizers.SGD(0.05))
    return told(model, model.fit(X, Y, batch_size=12, epochs=2, shuffle=False, verbose=0))


@program
def a_function_in_a_step_whose_gradient_has_rows() -> Any:
    """The function is not traced again for the smaller last batch."""

    class Inner(Own):
        @tf.function(reduce_retracing=True)  # type: ignore[untyped-decorator]
        def gradients(self, x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
            return loss, tape.gradient(loss, [w.value for w in self.trainable_variables])

        def train_step(self, data: Any) -> Any:
            loss, gradients = self.gradients(*data)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    words = np.random.default_rng(1).integers(0, 5, (80, 6))
    inputs = keras.Input((6,), dtype="int32")
    hidden = keras.layers.Flatten()(keras.layers.Embedding(5, 3)(inputs))
    model = Inner(inputs, dense()(hidden))
    model.compile(keras.optimizers.Adam(0.02))
    for batch_size in (12, 16):
        model.fit(words, Y, batch_size=batch_size, shuffle=False, verbose=0)
    return told(model)


@program
def batches_that_are_smaller_than_the_ranks() -> Any:
    found = {}
    for kind, loss_of in {
        "sum": lambda y, p: tf.reduce_sum(tf.square(y - p)),
        "mean": lambda y, p: tf.reduce_mean(tf.square(y - p)),
    }.items():
        rows = {"logs": lambda self, gradients: {"rows": tf.ones([1])}}
        model = functional(type("Model", (Own,), {"loss_of": staticmethod(loss_of), **rows}))
        model.compile(keras.optimizers.SGD(0.01))
        logs = [model.train_on_batch(X[i : i + 1], Y[i : i + 1]) for i in range(3)]
        model.train_on_batch(X[:12], Y[:12])
        found[kind] = told(model, logs=[np.ravel(log).tolist() for each in logs for log in each])
    return found


@program
def batches_that_nobody_can_divide() -> Any:
    """Each rank has all of them, so a sum over their samples is not added up."""
    x = tf.sparse.from_dense(X[:6])
    rows = {"logs": lambda self, gradients: {"rows": tf.ones([6])}}
    loss_of = staticmethod(lambda y, p: tf.reduce_sum(tf.square(y - p)))
    inputs = keras.Input((4,), sparse=True)
    model = type("Model", (Own,), {"loss_of": loss_of, **rows})(inputs, dense()(inputs))
    model.compile(keras.optimizers.SGD(0.01))
    logs = [model.train_on_batch(x, Y[:6]) for _ in range(2)]
    return told(model, logs=[np.ravel(log).tolist() for each in logs for log in each])


def dice(y: Any, p: Any) -> Any:
    """Of a whole batch, with a constant that keeps it away from 0 / 0."""
    both = tf.reduce_sum(y * p)
    return 1 - (2 * both + 1) / (tf.reduce_sum(y) + tf.reduce_sum(p) + 1)


def masked(y: Any, p: Any) -> Any:
    kept = tf.cast(y > 0.5, tf.float32)
    return tf.reduce_sum(kept * tf.square(y - p)) / tf.maximum(tf.reduce_sum(kept), 1)


#: Losses that add terms of different kinds.
TERMS: dict[str, Any] = {
    "mask": masked,
    "penalty": lambda y, p: masked(y, p) + 0.1 * tf.reduce_mean(tf.square(p)),
    "sum": lambda y, p: 0.1 * tf.reduce_sum(tf.square(y - p)) - tf.reduce_mean(p),
    "two masks": lambda y, p: (masked(y, p) + masked(1 - y, p)) / 2,
    "several": lambda y, p: [masked(y, p), 0.1 * tf.reduce_sum(tf.square(y - p))],
    "Dice": lambda y, p: dice(y, tf.sigmoid(p)),
}


@program
def losses_of_different_terms() -> Any:
    found = {}
    for name, each in TERMS.items():
        keras.utils.set_random_seed(1)
        found[name] = own(each)
    return found


@program
def losses_of_masks_and_overlaps() -> Any:
    found = {}
    losses = (masked, dice, keras.losses.Dice(), keras.losses.Tversky())
    for number, loss in enumerate(losses):
        keras.utils.set_random_seed(1)
        model = functional(keras.Model, dense(activation="sigmoid", kernel_regularizer="l2"))
        model.compile(keras.optimizers.SGD(0.3), loss, metrics=[masked, dice])
        history = model.fit(X, abs(Y) / 4, batch_size=12, shuffle=False, verbose=0)
        found[number] = told(model, history, tested=model.evaluate(X, abs(Y) / 4, verbose=0))
    return found


def bounded(y: Any, p: Any, least: float) -> Any:
    weights = tf.abs(y)
    return tf.reduce_sum(weights * tf.square(p)) / tf.maximum(tf.reduce_sum(weights), least)


def counted(y: Any, p: Any) -> Any:
    kept = tf.cast(y > 0, tf.int32)
    total = tf.reduce_sum(tf.cast(kept, tf.float32) * tf.square(y - p))
    return total / tf.cast(tf.maximum(tf.reduce_sum(kept), 1), tf.float32)


#: Losses whose terms lie deeper in the graph.
DEEP_TERMS: dict[str, Any] = {
    "below its bound": lambda y, p: bounded(y * 0.01, p, 1.0),
    "above its bound": lambda y, p: bounded(y, p, 0.5),
    "an integer count": counted,
    "values beside Dice": lambda y, p: [
        0.1 * tf.square(y - p)[:, 0],
        dice(tf.abs(y), tf.sigmoid(p)),
    ],
    "a mean and a sum": lambda y, p: [tf.reduce_mean(p), 0.1 * tf.reduce_sum(tf.square(y - p))],
    "a sum by Keras": lambda y, p: keras.losses.Dice(reduction="sum")(tf.abs(y), tf.sigmoid(p)),
    "stacked": lambda y, p: tf.reduce_sum(tf.stack([masked(y, p), tf.reduce_mean(p)])),
}


class Dices(keras.metrics.Metric):  # type: ignore[misc]
    """The mean over batches of a loss of a whole batch."""

    def __init__(self) -> None:
        super().__init__(name="dices")
        self.loss = keras.losses.Dice()
        self.sum = self.add_variable((), "zeros", name="sum")
        self.count = self.add_variable((), "zeros", name="count")

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        self.sum.assign_add(self.loss(y, p))
        self.count.assign_add(1.0)

    def result(self) -> Any:
        return self.sum / self.count


class Weighted(Own):
    """Weights the mean over unmasked values by their number."""

    loss_of = staticmethod(masked)

    def train_step(self, data: Any) -> Any:
        logs = super().train_step(data)
        x, y = data
        kept = tf.reduce_sum(tf.cast(y > 0.5, tf.float32))
        self.mean.update_state(masked(y, self(x)), sample_weight=kept)
        return {**logs, "mean": self.mean.result()}


@program
def losses_whose_terms_lie_deeper() -> Any:
    found: dict[str, Any] = {}
    for name, each in DEEP_TERMS.items():
        keras.utils.set_random_seed(1)
        found[name] = own(each)
    keras.utils.set_random_seed(1)
    model = functional(keras.Model, dense(activation="sigmoid"))
    metrics = [Dices(), keras.losses.Dice()]
    model.compile("sgd", "mse", metrics=metrics, steps_per_execution=2)
    y = abs(Y) / 4
    found["metrics"] = told(model, model.fit(X, y, batch_size=12, shuffle=False, verbose=0))
    keras.utils.set_random_seed(1)
    model = functional(Weighted)
    model.mean = keras.metrics.Mean(name="mean")
    model.compile(keras.optimizers.SGD(0.01))
    found["weighted"] = told(model, model.fit(X, Y, batch_size=12, shuffle=False, verbose=0))
    return found


@program
def masks_of_small_and_static_batches() -> Any:
    """Batches with fewer samples than ranks, and a sum over a static number of samples."""
    model = functional(keras.Model, dense(activation="sigmoid"))
    model.compile(keras.optimizers.SGD(0.3), dice, metrics=[masked])
    history = model.fit(X[:37], abs(Y[:37]) / 4, batch_size=12, shuffle=False, verbose=0)
    logs = [model.train_on_batch(X[:13], abs(Y[:13]) / 4)]
    small = told(model, history, logs=np.ravel(logs).tolist())
    keras.utils.set_random_seed(1)
    model = functional(Own)
    model.loss_of = lambda y, p: (
        tf.reduce_sum(tf.square(y - p)) / tf.cast(tf.shape(y)[0], tf.float32) + 0.1 * masked(y, p)
    )
    model.compile(keras.optimizers.SGD(0.01))
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(12, drop_remainder=True)
    return [small, told(model, model.fit(data, verbose=0))]


class Total(keras.metrics.Metric):  # type: ignore[misc]
    """Adds up a loss of Keras, as a perplexity does."""

    def __init__(self) -> None:
        super().__init__(name="total")
        self.loss = keras.losses.MeanSquaredError(reduction="sum")
        self.sum = self.add_variable((), "zeros", name="sum")
        self.count = self.add_variable((), "zeros", name="count")

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        self.sum.assign_add(self.loss(y, p))
        self.count.assign_add(keras.ops.cast(keras.ops.shape(y)[0], "float32"))

    def result(self) -> Any:
        return self.sum / self.count


@program
def metrics_with_a_loss() -> Any:
    model = functional()
    model.compile("sgd", "mse", metrics=[Total()])
    history = model.fit(X, Y, batch_size=12, shuffle=False, verbose=0)
    return told(model, history, tested=model.evaluate(X, Y, verbose=0))


class Ctc(keras.layers.Layer):  # type: ignore[misc]
    def call(self, labels: Any, outputs: Any) -> Any:
        count = tf.shape(labels)[0]
        sparse = tf.sparse.from_dense(tf.cast(labels, tf.int32))
        lengths = tf.fill([count], tf.shape(outputs)[1])
        turned = tf.transpose(tf.math.log_softmax(outputs), [1, 0, 2])
        self.add_loss(tf.compat.v1.nn.ctc_loss(sparse, turned, lengths))
        return outputs


@program
def ctc_by_add_loss() -> Any:
    inputs, labels = keras.Input((6, 2)), keras.Input((2,))
    model = keras.Model([inputs, labels], Ctc()(labels, dense(4)(inputs)))
    model.compile(keras.optimizers.SGD(0.01))
    x, y = np.tile(X[:, None, :2], (1, 6, 1)), 1.0 + (X[:, :2] > 0)
    return told(model, model.fit([x, y], batch_size=12, shuffle=False, verbose=0))


@program
def derivatives_by_a_column() -> Any:
    """As in networks of physics: the gradient of a concatenation."""

    class Model(keras.Model):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            x, y = data
            first, others = x[:, :1], x[:, 1:]
            with tf.GradientTape() as outer:
                with tf.GradientTape() as inner:
                    inner.watch(first)
                    value = self(tf.concat([first, others], 1))
                loss = tf.reduce_mean(tf.square(inner.gradient(value, first) - y))
            weights = self.trainable_variables
            self.optimizer.apply(outer.gradient(loss, weights), weights)
            return {"loss": loss}

    model = functional(Model)
    model.compile(keras.optimizers.SGD(0.01))
    return told(model, model.fit(X, Y, batch_size=16, shuffle=False, verbose=0))


@program
def roots_of_means() -> Any:
    """A subclass of `keras.metrics.Mean` whose result is no mean."""
    model = functional(keras.Model, dense())
    model.compile("sgd", "mse", metrics=[keras.metrics.RootMeanSquaredError()])
    history = model.fit(X, Y, batch_size=12, shuffle=False, verbose=0)
    logs = [model.train_on_batch(X[:13], Y[:13]), model.test_on_batch(X, Y)]
    return told(model, history, on_batch=logs)


@program
def means_by_a_static_size() -> Any:
    """Activity regularizers divide by a size that the graph has as a constant."""
    model = functional(keras.Model, dense(3, activity_regularizer="l2"), dense())
    model.compile("sgd", "mse", jit_compile=False)
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16, drop_remainder=True)
    history = model.fit(data, epochs=2, verbose=0)
    logs = [model.train_on_batch(X[:7], Y[:7]), model.test_on_batch(X[:7], Y[:7])]
    return told(model, history, logs=logs)


class Nested(keras.Model):  # type: ignore[misc]
    """A function that takes a gradient through functions of functions, as those of a GRU."""

    @tf.function  # type: ignore[untyped-decorator]
    def gradients(self, x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        return loss, tape.gradient(loss, [each.value for each in self.trainable_variables])

    def train_step(self, data: Any) -> Any:
        loss, gradients = self.gradients(*data)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


@program
def recurrent_layers_in_a_function() -> Any:
    x = inputs = keras.Input((6, 4))
    for _ in range(2):
        x = keras.layers.GRU(3, reset_after=False, return_sequences=True)(x)
    model = Nested(inputs, dense()(x[:, -1]))
    model.compile("sgd", jit_compile=False)
    sequences = np.repeat(X[:, None], 6, axis=1)
    return told(model, model.fit(sequences, Y, batch_size=40, shuffle=False, verbose=0))


@program
def metrics_by_other_names() -> Any:
    """The step of Keras' guide, a metric that returns its variable, and a recurrent layer."""

    class Right(keras.metrics.Metric):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="right")
            self.count = self.add_variable((), "zeros")

        def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
            self.count.assign_add(tf.reduce_sum(tf.cast(y * p > 0, "float32")))

        def result(self) -> Any:
            return self.count

    class Guide(keras.Model):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                predicted = self(x, training=True)
                loss = self.compute_loss(y=y, y_pred=predicted)
            weights = self.trainable_variables
            gradients = tape.gradient(loss, weights)
            self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
            for metric in self.metrics:
                if metric.name == "loss":
                    metric.update_state(loss)
                else:
                    metric.update_state(y, predicted)
            return {metric.name: metric.result() for metric in self.metrics}

    found = {}
    for kind in (Guide, keras.Model):
        model = functional(kind, keras.layers.Reshape((4, 1)), keras.layers.LSTM(3), dense())
        model.compile("adam", "mse", metrics=[keras.metrics.R2Score(), Right()])
        history = model.fit(X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0)
        found[kind.__name__] = told(model, history, evaluated=model.evaluate(X, Y, verbose=0))
    return found


@program
def metrics_beside_other_numbers() -> Any:
    """Steps that return the learning rate as well, and metrics under names of their own."""

    class Rate(keras.Model):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            return {**super().train_step(data), "rate": self.optimizer.learning_rate}

        def test_step(self, data: Any) -> Any:
            return {**super().test_step(data), "rate": 1.0}

    class Renamed(Own):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.of_train, self.of_test = keras.metrics.AUC(), keras.metrics.AUC()

        def loss_of(self, y: Any, predicted: Any) -> Any:
            return tf.reduce_mean((y - predicted) ** 2)

        def train_step(self, data: Any) -> Any:
            logs = super().train_step(data)
            self.of_train.update_state(data[1] > 0, tf.sigmoid(self(data[0])))
            return {**logs, "area": self.of_train.result()}

        def test_step(self, data: Any) -> Any:
            self.of_test.update_state(data[1] < 0, tf.sigmoid(self(data[0])))
            return {"area": self.of_test.result()}

    found = {}
    labels = (Y > 0).astype("float32")
    for eagerly in (False, True):
        model = functional(Rate, dense(1, activation="sigmoid"))
        names = [keras.metrics.AUC(), keras.metrics.RootMeanSquaredError()]
        model.compile("sgd", "binary_crossentropy", metrics=names, run_eagerly=eagerly)
        arguments: Any = {"batch_size": 12, "shuffle": False, "verbose": 0}
        history = model.fit(X, labels, validation_data=(X[:20], labels[:20]), **arguments)
        logs = [model.evaluate(X, labels, batch_size=9, verbose=0)]
        logs += [model.train_on_batch(X[:13], labels[:13]), model.test_on_batch(X[:5], labels[:5])]
        found[f"eagerly {eagerly}"] = told(model, history, logs=logs)
    renamed = functional(Renamed)
    renamed.compile("sgd")
    arguments = {"batch_size": 16, "shuffle": False, "verbose": 0, "epochs": 2}
    history = renamed.fit(X, Y, validation_data=(X[:9], Y[:9]), **arguments)
    return {**found, "renamed": told(renamed, history)}


class Results(keras.callbacks.Callback):  # type: ignore[misc]
    """Asks for the results of metrics when an epoch ends."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        results = self.model.get_metrics_result()
        self.found.append({name: float(result) for name, result in results.items()})


@program
def results_of_metrics_after_a_loop() -> Any:
    model, area = functional(keras.Model, dense(1, activation="sigmoid")), keras.metrics.AUC()
    model.compile("sgd", "binary_crossentropy", metrics=[area, "mae"])
    labels, results = (Y > 0).astype("float32"), Results()
    arguments: Any = {"batch_size": 12, "shuffle": False, "verbose": 0}
    history = model.fit(X, labels, epochs=2, callbacks=[results], **arguments)
    model.predict(X[:9], verbose=0)
    found = [float(area.result())]
    # Batches of unequal sizes are counted in addition to those of `fit`.
    for size in (7, 13, 2):
        found += [float(each) for each in model.train_on_batch(X[:size], labels[:size])]
        found.append(float(area.result()))
    model.evaluate(X, labels, batch_size=9, verbose=0)
    return told(model, history, results=[*results.found, *found, float(area.result())])


@program
def dicts_and_lazy_models() -> Any:
    class Lazy(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = dense(3, kernel_initializer="ones")

        def train_step(self, data: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = self.compute_loss(None, data["y"], self.inner(data["x"]))
            weights = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            return {"loss": loss}

    data = tf.data.Dataset.from_tensor_slices({"x": X, "y": Y}).batch(16)
    model = Lazy()
    model.compile("adam", "mse")
    return told(model, model.fit(data, epochs=2, verbose=0))


@program
def a_size_that_the_batch_has() -> Any:
    class Noisy(Own):
        def train_step(self, data: Any) -> Any:
            x, y = data
            zeros = tf.zeros([x.shape[0], 4])
            return super().train_step((x + zeros, y))

    kind = type("Model", (Noisy,), {"loss_of": lambda _, y, p: tf.reduce_mean(tf.abs(y - p))})
    model = functional(kind)
    model.compile("sgd")
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(12, drop_remainder=True)
    return told(model, model.fit(data, epochs=2, verbose=0))


@program
def trainers_mixed_in_by_themselves() -> Any:
    trainer = next(kind for kind in keras.Model.__mro__ if "fit" in vars(kind))

    class Layer(trainer, keras.layers.Dense):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            keras.layers.Dense.__init__(self, 1)
            trainer.__init__(self)

    model = Layer()
    model.compile("adam", "mse", metrics=["mae"])
    history = model.fit(X, Y, batch_size=12, epochs=2, shuffle=False, verbose=0)
    predicted = model.predict(X, batch_size=12, verbose=0).tolist()
    return told(model, history, evaluated=model.evaluate(X, Y, verbose=0), predicted=predicted)


@program
def optional_inputs() -> Any:
    first, second = keras.Input((4,), name="x"), keras.Input((4,), name="o", optional=True)

    class Sum(keras.layers.Layer):  # type: ignore[misc]
        def call(self, x: Any, o: Any) -> Any:
            return x if o is None else x + o

    found = {}
    for name, other in {"none": None, "there": X}.items():
        model = keras.Model({"x": first, "o": second}, dense()(Sum()(first, second)))
        model.compile("adam", "mse")
        arrays = {"x": X, "o": other}
        history = model.fit(arrays, Y, batch_size=12, shuffle=False, verbose=0)
        # A batch of one sample, of which another rank has none.
        batches = ((each, Y[:1]) for each in [{"x": X[:1], "o": None}] * 3)
        model.fit(batches, verbose=0)
        predicted = model.predict(arrays, verbose=0).tolist()
        found[name] = told(model, history, predicted=predicted)
    return found


@program
def sparse_batches_in_any_order() -> Any:
    def batches() -> Any:
        for begin in range(0, 80, 12):
            x = tf.sparse.from_dense(X[begin : begin + 12])
            order = np.random.default_rng(begin).permutation(len(x.values))
            x = tf.sparse.SparseTensor(
                tf.gather(x.indices, order), tf.gather(x.values, order), x.dense_shape
            )
            yield x, Y[begin : begin + 12]

    class Linear(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = dense()

        def call(self, x: Any) -> Any:
            return self.inner(x)

    model = Linear()
    model.compile("adam", "mse")
    history = model.fit(batches(), verbose=0)
    predicted = model.predict(batches(), verbose=0).tolist()
    return told(model, history, predicted=predicted)


@program
def penalties_of_sequences() -> Any:
    """Sums and means of outputs of loops over the steps, whose rows the graph hides."""

    class Penalty(keras.layers.Layer):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            self.add_loss(0.01 * tf.reduce_sum(x**2) + 0.01 * tf.reduce_sum(tf.abs(x)))
            return x

    layers, found = keras.layers, []
    for layer in (
        layers.LSTM(2, return_sequences=True),
        layers.Bidirectional(layers.SimpleRNN(2, return_sequences=True)),
        layers.TimeDistributed(dense(2)),
        layers.GRU(2, return_sequences=True, activity_regularizer="l2"),
    ):
        is_regularized = layer.activity_regularizer is not None
        inputs = keras.Input((2, 2))
        hidden = layer(inputs) if is_regularized else Penalty()(layer(inputs))
        model = keras.Model(inputs, dense()(hidden))
        model.compile(keras.optimizers.SGD(0.05), "mse")
        x = X.reshape(80, 2, 2)
        found.append(told(model, model.fit(x, x[..., :1], batch_size=12, shuffle=False, verbose=0)))
    return dict(enumerate(found))


class Reading(keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Reads what it has just saved."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        assert os.path.getsize(self.filepath) > 1000


@program
def checkpoints_that_are_read_at_once() -> Any:
    """Their path is that of all ranks, or each rank's own."""
    found = {}
    for kind, directory in {"common": sys.argv[1], "own": tempfile.mkdtemp()}.items():
        model = functional()
        model.compile("sgd", "mse")
        saving = Reading(os.path.join(directory, "saved.keras"))
        model.fit(X, Y, batch_size=16, shuffle=False, verbose=0, callbacks=[saving])
        found[kind] = told(keras.models.load_model(saving.filepath))
    return found


@program
def scopes_and_files() -> Any:
    strategy = tf.distribute.get_strategy()
    with strategy.scope():
        model = functional()
        model.compile("sgd", "mse")
    history = model.fit(X, Y, batch_size=16, shuffle=False, verbose=0)
    directory = os.path.join(sys.argv[1], str(os.getpid()))
    model.export(directory, verbose=False)
    loaded = tf.saved_model.load(directory)
    served = loaded.serve(X).numpy()
    with tf.GradientTape() as tape:  # of a layer, outside of any step
        value = tf.reduce_sum(model(X))
    gradients = tape.gradient(value, model.trainable_variables)
    keras.optimizers.SGD(0.0).apply_gradients(
        zip(gradients, model.trainable_variables, strict=True)
    )
    count = strategy.num_replicas_in_sync
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        dense().build((None, 2))
    return told(model, history, served=served.tolist(), replicas=count)


PROGRAMS.update({function.__name__: function for function in given_rows.ALL})

if __name__ == "__main__":
    results: dict[str, Any] = {}
    for name, function in PROGRAMS.items():
        keras.utils.set_random_seed(1)
        results[name] = function()
    print(json.dumps(results))
