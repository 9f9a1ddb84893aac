"""Three ranks learn handwritten digits by each rule of the demo.

Under parameter servers, which have rules for it, one of them is slower.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import pytest

from gradring import updates
from gradring.testing import run_ranks
from gradring.tools.demo.rules import REQUIRED_ACCURACY, RULES
from support.chosen import chosen, marked
from support.keras_models import needs_fit
from support.served import served
from support.tf_worker import join

pytestmark = needs_fit

#: One of each kind: sums of several batches; rounds of steps; and servers.
QUICK = ("sync-every-4", "local-sgd", "parameter-server")
STEPS = 400
#: The worker whose steps take so many times as long.
SLOW, SLOWER = 2, 3
#: What is added to the steps of the others, and so many times as much to its.
STEP_S = 0.003
#: Of the steps of one call: a multiple of the demo's rounds.
AT_ONCE = 80
#: Of one training, one image of the 357 is more than a quarter of a percent.
SEEDS = (1, 2, 3)
#: What is worth them: how many thousandths of accuracy it lacks at most, and of the bytes it sends.
COMPARED = {
    "all-reduce": (0, 1000),
    "diloco": (5, 100),
    "int8": (10, 333),
    "bits16": (10, 600),
    "top-k": (10, 200),
    "power-sgd": (10, 250),
}
#: With a fourth of the steps, each has to be larger; with three times as many updates, smaller.
RATES = dict.fromkeys(RULES, 0.005) | {
    "sync-every-4": 0.01,
    "asynchronous": 0.002,
}


def train_all(names: list[str]) -> dict[str, list[tuple[float, int]]]:
    with join() as comm:
        averaged = ("all-reduce", "diloco", *(n for n in RULES if depends_on_time(n)))
        return {
            name: [train(comm, name, seed) for seed in (SEEDS if name in averaged else SEEDS[:1])]
            for name in names
        }


def depends_on_time(name: str) -> bool:
    """Whether the order of updates, and so each result, is another in every run."""
    rule = RULES[name]
    return isinstance(rule, updates.ParameterServer) and not rule.is_synchronous


def train(comm: Any, name: str, seed: int) -> tuple[float, int]:
    """The accuracy on images that were not trained on, and the bytes that this rank has sent."""
    from gradring.tensorflow import CustomCollectiveStrategy

    rule = RULES[name]
    if isinstance(rule, updates.ParameterServer):
        with served(comm, rule) as strategy:
            return train_by(strategy, comm.rank, name, seed)
    return train_by(CustomCollectiveStrategy(update=rule), comm.rank, name, seed)


def train_by(strategy: Any, rank: int, name: str, seed: int) -> tuple[float, int]:
    import keras
    import numpy as np
    import tensorflow as tf

    from gradring.tensorflow import check_replicas
    from gradring.tools.demo.train import GLOBAL_BATCH, TRAINING_IMAGES, load_data

    (images, labels), (test_images, test_labels) = load_data()
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        layers = [keras.layers.Flatten(), keras.layers.Dense(64, "tanh"), keras.layers.Dense(10)]
        model = keras.Sequential([keras.layers.Input((8, 8, 1)), *layers])
        optimizer = keras.optimizers.Adam(RATES[name])
        optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    draw = np.random.default_rng(seed)
    epochs = -(-STEPS * GLOBAL_BATCH // TRAINING_IMAGES)
    drawn = np.concatenate([draw.permutation(TRAINING_IMAGES) for _ in range(epochs)])
    own = drawn[: STEPS * GLOBAL_BATCH].reshape(STEPS, GLOBAL_BATCH)[:, rank::3]
    is_served = isinstance(strategy.update_rule, updates.ParameterServer)
    step_s = STEP_S * (SLOWER if rank == SLOW else 1) if is_served else 0.0
    # What waits for no worker does not wait for the slow one to do all of its steps.
    waits = not is_served or strategy.update_rule.is_synchronous
    steps_here = STEPS if waits or rank != SLOW else STEPS // SLOWER

    def replica_step(batch: Any) -> None:
        if step_s:
            tf.numpy_function(lambda: time.sleep(step_s), [], [])
        with tf.GradientTape() as tape:
            outputs = model(tf.gather(images, batch), training=True)
            loss = loss_of(tf.gather(labels, batch), outputs) / GLOBAL_BATCH
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    @tf.function  # type: ignore[untyped-decorator]
    def steps(batches: Any) -> None:
        for batch in batches:
            strategy.run(replica_step, args=(batch,))

    before = strategy.communicator.stats()["bytes_sent"]
    for start in range(0, steps_here, AT_ONCE):
        steps(tf.constant(own[start : start + AT_ONCE]))
    sent = strategy.communicator.stats()["bytes_sent"] - before
    check_replicas(model.variables + optimizer.variables, communicator=strategy.communicator)
    found = np.argmax(model(test_images), axis=-1)
    return float(np.mean(found == test_labels)), sent


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Any:
    pytest.importorskip("sklearn")
    names = {*chosen(request, "name")}
    if chosen(request, "name", COMPARES):
        names.add("all-reduce")
    # Bytes can be compared where no measurement chooses the schedule.
    env = {"GRADRING_ALGORITHM": "ring"}
    return run_ranks(train_all, 3, [n for n in RULES if n in names], timeout=280, env=env)


COMPARES = "test_fewer_bytes_reach_nearly_the_same_accuracy"


@pytest.mark.parametrize("name", marked(RULES, QUICK))
def test_each_rule_learns_digits(ranks: Any, name: str) -> None:
    for rank in ranks:
        found = [accuracy for accuracy, _ in rank[name]]
        if depends_on_time(name):
            found = [statistics.median(found)]
        assert min(found) >= REQUIRED_ACCURACY
        if not isinstance(RULES[name], updates.ParameterServer):
            assert [accuracy for accuracy, _ in rank[name]] == [one for one, _ in ranks[0][name]]


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPARED)
def test_fewer_bytes_reach_nearly_the_same_accuracy(ranks: Any, name: str) -> None:
    lacking, of_bytes = COMPARED[name]
    for rank in ranks:
        accuracy, sent, whole, all_bytes = (
            sum(training[part] for training in rank[which]) / len(rank[which])
            for which in (name, "all-reduce")
            for part in (0, 1)
        )
        assert accuracy >= whole - lacking / 1000
        assert sent <= all_bytes * of_bytes / 1000
