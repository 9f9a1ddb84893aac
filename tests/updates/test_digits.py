"""Three ranks learn handwritten digits by each rule of the demo."""

from __future__ import annotations

from typing import Any

import pytest
from keras_models import needs_fit
from tf_worker import join

from gradring.demo.rules import REQUIRED_ACCURACY, RULES
from gradring.testing import run_ranks

pytestmark = needs_fit

STEPS = 400
#: Of the steps of one call: a multiple of the demo's rounds.
AT_ONCE = 80
#: Of one training, one image of the 357 is more than a quarter of a percent.
SEEDS = (1, 2, 3)
#: With a fourth of the steps, each has to be larger.
RATES = dict.fromkeys(RULES, 0.005) | {"sync-every-4": 0.01}


def train_all() -> dict[str, list[tuple[float, int]]]:
    with join() as comm:
        compared = ("all-reduce", "diloco")
        return {
            name: [train(comm, name, seed) for seed in (SEEDS if name in compared else SEEDS[:1])]
            for name in RULES
        }


def train(comm: Any, name: str, seed: int) -> tuple[float, int]:
    """The accuracy on images that were not trained on, and the bytes that this rank has sent."""
    import keras
    import numpy as np
    import tensorflow as tf

    from gradring.demo.train import GLOBAL_BATCH, TRAINING_IMAGES, load_data
    from gradring.tensorflow import CustomCollectiveStrategy, check_replicas

    (images, labels), (test_images, test_labels) = load_data()
    keras.utils.set_random_seed(seed)
    strategy = CustomCollectiveStrategy(update=RULES[name])
    with strategy.scope():
        layers = [keras.layers.Flatten(), keras.layers.Dense(64, "tanh"), keras.layers.Dense(10)]
        model = keras.Sequential([keras.layers.Input((8, 8, 1)), *layers])
        optimizer = keras.optimizers.Adam(RATES[name])
        optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    draw = np.random.default_rng(seed)
    epochs = -(-STEPS * GLOBAL_BATCH // TRAINING_IMAGES)
    drawn = np.concatenate([draw.permutation(TRAINING_IMAGES) for _ in range(epochs)])
    own = drawn[: STEPS * GLOBAL_BATCH].reshape(STEPS, GLOBAL_BATCH)[:, comm.rank :: 3]

    def replica_step(batch: Any) -> None:
        with tf.GradientTape() as tape:
            outputs = model(tf.gather(images, batch), training=True)
            loss = loss_of(tf.gather(labels, batch), outputs) / GLOBAL_BATCH
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    @tf.function  # type: ignore[untyped-decorator]
    def steps(batches: Any) -> None:
        for batch in batches:
            strategy.run(replica_step, args=(batch,))

    before = comm.stats()["bytes_sent"]
    for start in range(0, STEPS, AT_ONCE):
        steps(tf.constant(own[start : start + AT_ONCE]))
    sent = comm.stats()["bytes_sent"] - before
    check_replicas(model.variables + optimizer.variables)
    found = np.argmax(model(test_images), axis=-1)
    return float(np.mean(found == test_labels)), sent


@pytest.fixture(scope="module")
def ranks() -> Any:
    pytest.importorskip("sklearn")
    return run_ranks(train_all, 3, timeout=280)


@pytest.mark.parametrize("name", RULES)
def test_each_rule_learns_digits(ranks: Any, name: str) -> None:
    for rank in ranks:
        for accuracy, _ in rank[name]:
            assert accuracy >= REQUIRED_ACCURACY
        assert [accuracy for accuracy, _ in rank[name]] == [one for one, _ in ranks[0][name]]


def test_diloco_sends_less_than_a_tenth_for_an_equal_accuracy(ranks: Any) -> None:
    for rank in ranks:
        accuracies, sent = (
            {
                name: sum(training[part] for training in rank[name]) / len(SEEDS)
                for name in ("all-reduce", "diloco")
            }
            for part in (0, 1)
        )
        assert abs(accuracies["diloco"] - accuracies["all-reduce"]) <= 0.005
        assert sent["diloco"] < sent["all-reduce"] / 10
