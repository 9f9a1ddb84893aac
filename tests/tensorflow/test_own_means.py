"""Means that a `train_step` takes by itself under the changed line: named, once each."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradring.testing import run_ranks
from support.keras_models import needs_fit
from support.log_lines import kept_lines
from support.tf_worker import join

#: What is said of an optimizer.
SAID = "adds up the gradients of a mean"


def losses() -> dict[str, Any]:
    """By kind, the loss of a step; those of `WRONG` count double on two replicas."""
    import keras
    import tensorflow as tf

    def count() -> int:
        return int(tf.distribute.get_strategy().num_replicas_in_sync)

    def squares(y: Any, p: Any) -> Any:
        return tf.reduce_sum(tf.square(y - p), axis=-1)

    return {
        "a mean": lambda y, p: tf.reduce_mean(tf.square(y - p)),
        "a mean and a penalty": lambda y, p: 0.3 * tf.reduce_mean(squares(y, p)) + 0.1,
        "a sum divided by the samples": lambda y, p: (
            tf.reduce_sum(squares(y, p)) / tf.cast(tf.shape(y)[0], tf.float32)
        ),
        "a mean of a layer with factors": lambda y, p: tf.reduce_mean(tf.square(y - 2 * p)),
        "a mean with another axis": lambda y, p: tf.reduce_mean(tf.square(y - p)[..., None]),
        "a mean divided by the replicas": lambda y, p: tf.reduce_mean(squares(y, p)) / count(),
        "a mean divided in a function": tf.function(
            lambda y, p: tf.reduce_mean(squares(y, p)) / count()
        ),
        "a mean times a part": lambda y, p: tf.reduce_mean(squares(y, p)) * (1 / count()),
        "a sum divided by the batch": lambda y, p: tf.reduce_sum(squares(y, p)) / 8,
        "an average": lambda y, p: tf.nn.compute_average_loss(squares(y, p), global_batch_size=8),
        "a loss of Keras": keras.losses.MeanSquaredError(),
        "no loss of the batch": lambda y, p: tf.reduce_mean(tf.ones([2]) * p[0, 0]),
    }


def losses_with_factors() -> dict[str, Any]:
    """Losses that have the factors of a division by two replicas, in a program that has none."""
    import tensorflow as tf

    return {
        "half a mean": lambda y, p: 0.5 * tf.reduce_mean(tf.square(y - p)),
        "twice a mean": lambda y, p: 2 - 2 * tf.reduce_mean(y * p),
    }


WRONG = (
    *("half a mean", "twice a mean"),
    *("a mean", "a mean and a penalty", "a sum divided by the samples"),
    *("a mean of a layer with factors", "a mean with another axis", "one gradient divided"),
)


def reads_of_replicas() -> list[Any]:
    import tensorflow as tf

    def in_a_step(read: Any) -> Any:
        return lambda strategy: strategy.run(read)

    return [
        lambda strategy: strategy.num_replicas_in_sync,
        in_a_step(lambda: tf.distribute.get_replica_context().num_replicas_in_sync),
        in_a_step(lambda: tf.nn.compute_average_loss(tf.ones([2]))),
        in_a_step(lambda: tf.nn.scale_regularization_loss(tf.ones([]))),
    ]


def train() -> list[tuple[str, list[str]]]:
    """What this rank logs of each kind."""
    import keras
    import tensorflow as tf

    from gradring import updates
    from gradring.tensorflow import CustomCollectiveStrategy

    records = kept_lines()

    class Own(keras.Model):  # type: ignore[misc]
        loss_of: Any = None
        #: What becomes of the gradients.
        changed: Any = staticmethod(lambda gradients: gradients)

        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.loss_of(y, self(x, training=True))
            gradients = self.changed(tape.gradient(loss, self.trainable_variables))
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    def halved(gradients: Any) -> Any:
        count = tf.distribute.get_strategy().num_replicas_in_sync
        return [gradient / count for gradient in gradients]

    x = np.random.default_rng(0).normal(size=(16, 4)).astype("f")
    found = []

    def fit(kind: str, strategy: Any, loss_of: Any, **more: Any) -> None:
        records.clear()
        with strategy.scope():
            inputs = keras.Input((4,))
            model = type("Model", (Own,), {"loss_of": staticmethod(loss_of), **more})(
                inputs, keras.layers.Dense(1)(inputs)
            )
            model.compile(keras.optimizers.SGD(0.01, name="mine"))
        model.fit(x, x[:, :1], batch_size=8, verbose=0)
        found.append((kind, [line for line in records if SAID in line]))

    with join() as comm:
        for kind, loss_of in losses_with_factors().items():
            strategy = CustomCollectiveStrategy(communicator=comm)
            fit(kind, strategy, loss_of)
            assert not strategy.extended.replicas_were_read
        strategy = CustomCollectiveStrategy(communicator=comm)
        for kind, loss_of in losses().items():
            fit(kind, strategy, loss_of)
        assert strategy.extended.replicas_were_read
        for read in reads_of_replicas():
            strategy = CustomCollectiveStrategy(communicator=comm)
            with strategy.scope():
                read(strategy)
            assert strategy.extended.replicas_were_read
        mean = losses()["a mean"]
        fit("gradients divided", strategy, mean, changed=staticmethod(halved))
        first = staticmethod(lambda gradients: [*halved(gradients[:1]), *gradients[1:]])
        fit("one gradient divided", strategy, mean, changed=first)
        local = CustomCollectiveStrategy(communicator=comm, update=updates.LocalSGD(2))
        fit("an update of each rank's own", local, mean)
    return found


@needs_fit
def test_a_mean_of_the_programs_own_is_named_once() -> None:
    first, second = run_ranks(train, 2, timeout=300)
    assert all(not lines for _, lines in second)
    for kind, lines in first:
        assert len(lines) == (kind in WRONG), (kind, lines)
        assert all("'mine'" in line and "2 times" in line for line in lines)
