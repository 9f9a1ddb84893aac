"""Sequences of different lengths, which masks and weights tell, trained by `fit` in many ways."""

from typing import Any

import numpy as np

from support.keras_models import strategy_of

#: Steps of each sequence that count; workers have others in every batch of four, and one has none.
LENGTHS = (6, 5, 1, 2, 0, 0, 4, 6, 1, 1, 6, 5, 3)
STEPS, WORDS, CLASSES = 6, 9, 3
BATCH = 4


def words() -> Any:
    """Of each sequence; 0 after its end."""
    draw = np.random.default_rng(3)
    found = draw.integers(1, WORDS, size=(len(LENGTHS), STEPS)).astype(np.int32)
    found[np.arange(STEPS) >= np.array(LENGTHS)[:, None]] = 0
    return found


def of_steps(kind: str, x: Any) -> Any:
    draw = np.random.default_rng(4)
    if kind == "labels":
        return draw.integers(0, CLASSES, size=x.shape).astype(np.int32)
    if kind == "values":
        return draw.normal(size=(*x.shape, 1)).astype(np.float32)
    return draw.uniform(0.1, 3, size=x.shape).astype(np.float32)


def embedded(given: Any) -> Any:
    import keras

    return keras.layers.Embedding(WORDS, 4, mask_zero=True)(given)


def tagger(comm: Any, loss: Any, kind: str = "embedding", **options: Any) -> Any:
    """A compiled model that gives each step a class; `kind` says what masks."""
    import keras

    keras.utils.set_random_seed(5)
    with strategy_of(comm).scope():
        given = keras.Input((None,) if kind == "any length" else (STEPS,), dtype="int32")
        if kind == "masking":
            scaled = keras.layers.Rescaling(0.2)(keras.layers.Reshape((STEPS, 1))(given))
            hidden = keras.layers.Masking()(scaled)
            hidden = keras.layers.BatchNormalization(momentum=0.7, synchronized=True)(hidden)
        elif kind == "none":
            hidden = keras.layers.Embedding(WORDS, 4)(given)
        else:
            hidden = embedded(given)
        hidden = keras.layers.LSTM(4, return_sequences=True)(hidden)
        end = keras.layers.Dense(CLASSES, "softmax", kernel_regularizer="l2")
        model = keras.Model(given, end(hidden))
        model.compile(keras.optimizers.SGD(0.3), loss, **options)
    return model


def cross_entropy(**options: Any) -> Any:
    import keras

    return keras.losses.SparseCategoricalCrossentropy(**options)


def trained(model: Any, *data: Any, **options: Any) -> dict[str, Any]:
    """Weights and logs after `fit` and `evaluate`."""
    fit = model.fit(*data, shuffle=False, verbose=0, **options)
    weighted = {"sample_weight": options["sample_weight"]} if "sample_weight" in options else {}
    batch = {"batch_size": BATCH} if "batch_size" in options else {}
    scores = model.evaluate(*data, verbose=0, **weighted, **batch)
    return {"weights": model.get_weights(), "logs": [*fit.history.values(), scores]}


def by_fit_of_masked_steps(comm: Any) -> Any:
    """Weights of samples as well, and metrics with and without them."""
    x = words()
    of_all = ["sparse_categorical_crossentropy"]
    model = tagger(comm, cross_entropy(), metrics=of_all, weighted_metrics=["accuracy"])
    weights = of_steps("weights", x)
    return trained(model, x, of_steps("labels", x), sample_weight=weights, batch_size=BATCH)


def by_fit_of_full_batches(comm: Any) -> Any:
    """All workers have as many samples, which is known; another layer masks, one normalises."""
    import tensorflow as tf

    x = words()
    data = tf.data.Dataset.from_tensor_slices((x, of_steps("labels", x)))
    model = tagger(comm, cross_entropy(), "masking")
    return trained(model, data.batch(BATCH, drop_remainder=True))


def by_fit_of_masked_outputs(comm: Any) -> Any:
    """Two outputs with a mask and one without; each loss has a weight, and is logged."""
    import keras

    x = words()
    keras.utils.set_random_seed(5)
    with strategy_of(comm).scope():
        given = keras.Input((STEPS,), dtype="int32")
        hidden = embedded(given)
        ends = {
            "label": keras.layers.Dense(CLASSES, "softmax", name="label")(hidden),
            "value": keras.layers.Dense(1, name="value")(hidden),
            "whole": keras.layers.Dense(1, name="whole")(keras.layers.LSTM(2)(hidden)),
        }
        model = keras.Model(given, ends)
        losses = {"label": cross_entropy(reduction="mean"), "value": "mse", "whole": "mae"}
        model.compile(
            keras.optimizers.SGD(0.3),
            losses,
            loss_weights={"label": 0.5, "value": 2.0, "whole": 0.7},
        )
    y = {"label": of_steps("labels", x), "value": of_steps("values", x)}
    y["whole"] = y["value"].mean(1)
    return trained(model, x, y, batch_size=BATCH, epochs=2)


def by_fit_of_weighted_means(comm: Any) -> Any:
    """Keras divides by the weights, which classes give."""
    import keras

    x = words()
    y = np.arange(len(x)) % CLASSES
    keras.utils.set_random_seed(5)
    with strategy_of(comm).scope():
        pooled = keras.layers.LSTM(4)
        end = keras.layers.Dense(CLASSES, "softmax")
        given = keras.Input((STEPS,), dtype="int32")
        model = keras.Model(given, end(pooled(embedded(given))))
        loss = cross_entropy(reduction="mean_with_sample_weight")
        model.compile(keras.optimizers.SGD(0.3), loss)
    return trained(model, x, y, class_weight={0: 0.2, 1: 7.0, 2: 1.0}, batch_size=BATCH)


def by_fit_of_ignored_labels(comm: Any) -> Any:
    """The loss masks by itself, and the model does not; of several steps in an execution."""
    x = words()
    y = np.where(x == 0, -1, of_steps("labels", x))
    model = tagger(comm, cross_entropy(ignore_class=-1), "none", steps_per_execution=2)
    return trained(model, x, y, batch_size=BATCH)


def by_fit_of_sums(comm: Any) -> Any:
    x = words()
    model = tagger(comm, cross_entropy(reduction="sum"), "masking")
    model.optimizer.learning_rate = 0.02
    return trained(model, x, of_steps("labels", x), batch_size=BATCH)


def by_fit_of_an_own_mean(comm: Any) -> Any:
    """A program's loss that divides by itself: by what all workers have."""
    import keras
    import tensorflow as tf

    class OfValidSteps(keras.losses.Loss):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(reduction="sum")

        def call(self, y_true: Any, y_pred: Any) -> Any:
            is_valid = tf.cast(y_true >= 0, y_pred.dtype)
            losses = keras.losses.sparse_categorical_crossentropy(tf.nn.relu(y_true), y_pred)
            count = tf.reduce_sum(is_valid)
            replica = tf.distribute.get_replica_context()
            if replica is not None:  # Keras is not just building the model
                count = replica.all_reduce("SUM", count)
            return tf.math.divide_no_nan(tf.reduce_sum(losses * is_valid), count)

    x = words()
    y = np.where(x == 0, -1, of_steps("labels", x))
    return trained(tagger(comm, OfValidSteps(), "none"), x, y, batch_size=BATCH)


def by_batches_of_own_lengths(comm: Any) -> Any:
    """Each rank pads to its own longest sequence, and runs without a graph, too."""
    x, found = words(), []
    y, half = of_steps("labels", x), slice(0, 2) if comm.rank == 0 else slice(2, None)
    rows = slice(None) if comm.world_size == 1 else half
    for run_eagerly in (False, True):
        model = tagger(comm, cross_entropy(), "any length", run_eagerly=run_eagerly)
        for begin in (0, 6, 9):
            own, labels = x[begin : begin + BATCH][rows], y[begin : begin + BATCH][rows]
            longest = max(LENGTHS[begin : begin + BATCH][rows])
            model.train_on_batch(own[:, :longest], labels[:, :longest])
        found.append(model.get_weights())
    return {"weights": [each for weights in found for each in weights], "logs": []}


WAYS = (
    by_fit_of_masked_steps,
    by_fit_of_full_batches,
    by_fit_of_masked_outputs,
    by_fit_of_weighted_means,
    by_fit_of_ignored_labels,
    by_fit_of_sums,
    by_fit_of_an_own_mean,
    by_batches_of_own_lengths,
)
