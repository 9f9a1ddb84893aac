"""Models that are trained by each rule: one job of two ranks, with everything in it."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gradring import updates
from gradring.testing import run_ranks
from support.chosen import chosen, marked
from support.keras_models import (
    BATCH,
    STEPS,
    compiled,
    dataset,
    needs_fit,
    samples,
    state_of,
    train_by_fit,
    train_by_loop,
)
from support.log_lines import kept_lines
from support.tf_worker import join, refusal

pytestmark = needs_fit

KINDS = ("mlp", "embedding", "plain BN", "mixed precision")
#: Of which gradients are rows.
QUICK = ("embedding",)
WHOM = ("", ", to the chief")
#: float16 rounds elsewhere.
TOLERANCES = dict.fromkeys(KINDS, 2e-5) | {"mixed precision": 2e-3}
ACCUMULATED = 3
EVERY = 5
OUTER = updates.Nesterov(0.7, 0.9)
RATE = 0.125
RULES_OF_EPOCHS = (updates.AllReduce(), updates.Primary(), updates.LocalSGD(EVERY))


def job(directory: str, kinds: list[str], whom: list[str]) -> dict[str, Any]:
    import tensorflow as tf

    with join() as comm:
        (cpu,) = tf.config.list_physical_devices("CPU")
        two = [tf.config.LogicalDeviceConfiguration()] * 2
        tf.config.set_logical_device_configuration(cpu, two)
        done = scenarios(comm, directory, kinds, whom)
        return {name: scenario() for name, scenario in done.items()}


def scenarios(
    comm: Any, directory: str, kinds: list[str], whom: list[str]
) -> dict[str, Callable[[], Any]]:
    """What the ranks do, one after the other; tests look at what comes of it."""
    small = {
        "adds up": (updates.AllReduce(sync_every=ACCUMULATED), "mlp"),
        "large": (updates.AllReduce(), "mlp"),
        "adds up, to the chief": (updates.Primary(sync_every=ACCUMULATED), "embedding"),
        "large, to the chief": (updates.AllReduce(), "embedding"),
    }
    accumulating = [f"{name}{those}" for those in whom for name in ("adds up", "large")]
    by_hand = {
        f"{name}{', eagerly' * eager}": (outer, eager)
        for name, outer in (("plain", None), ("outer", OUTER))
        for eager in (False, True)
    }
    return {
        "primary": lambda: {kind: by_fit(kind, updates.Primary()) for kind in kinds},
        "all_reduce": lambda: {kind: by_fit(kind, updates.AllReduce()) for kind in kinds},
        "every step": lambda: {kind: by_fit(kind, updates.LocalSGD(1)) for kind in kinds},
        "accumulated": lambda: {name: accumulated(*small[name]) for name in accumulating},
        "parts": parts,
        "rounds": lambda: {name: rounds(comm, *which) for name, which in by_hand.items()},
        "fit": lambda: local_fit(comm, os.path.join(directory, f"rank-{comm.rank}.weights.h5")),
        "epochs": lambda: {str(rule): epochs(rule) for rule in RULES_OF_EPOCHS},
        "looked at": lambda: looked_at(comm, os.path.join(directory, "saved.weights.h5")),
        "checked": lambda: checked(comm),
        "elastic": lambda: elastic(comm),
        "refused": lambda: refused(comm),
    }


def strategy_by(rule: updates.Rule, **options: Any) -> Any:
    from gradring.tensorflow import CustomCollectiveStrategy

    return CustomCollectiveStrategy(update=rule, **options)


def by_fit(kind: str, rule: updates.Rule) -> Any:
    import keras

    keras.utils.set_random_seed(1)
    return train_by_fit(strategy_by(rule), kind, "SGD")


def by_loop() -> list[Any]:
    import keras

    found = []
    with join():
        for rule in (updates.Primary(), updates.AllReduce()):
            keras.utils.set_random_seed(1)
            strategy = strategy_by(rule)
            found.append(train_by_loop(strategy, "mlp", "SGD momentum", global_clipnorm=0.1))
    return found


def accumulated(rule: Any, kind: str) -> Any:
    """Small batches by a rule that adds up, or large ones by one that does not."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(1)
    schedule = keras.optimizers.schedules.ExponentialDecay(0.01, 1, 0.5)
    # What is added up over steps has each word once, so the large batch has, too.
    strategy = strategy_by(rule, embeddings="sum")
    with strategy.scope():
        model = compiled(strategy, kind, "Adam")
        model.compile(keras.optimizers.Adam(schedule, use_ema=True), model.loss)
    size = BATCH * ACCUMULATED if rule == updates.AllReduce() else BATCH
    data = tf.data.Dataset.from_tensor_slices(samples(kind == "embedding")).batch(size)
    model.fit(data, verbose=0)
    return state_of(model, model.optimizer)


def parts() -> list[float]:
    """Two variables that one optimizer is applied to in turn, and one that has few gradients."""
    import keras
    import tensorflow as tf

    strategy = strategy_by(updates.AllReduce(sync_every=2))
    with strategy.scope():
        variables = [tf.Variable(0.0) for _ in range(3)]
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build(variables)

    def replica_step(step: int) -> None:
        one = tf.constant(0.5)  # as of a loss that is divided by the number of replicas
        first, second, third = variables
        optimizer.apply([one], [first])
        optimizer.apply([one, None if step % 2 else one], [second, third])

    for step in range(4):
        strategy.run(replica_step, args=(step,))
    return [float(variable.numpy()) for variable in variables]


def rounds(comm: Any, outer: updates.Nesterov | None, eager: bool) -> Any:
    """Two rounds and a step of known gradients, which differ between the ranks."""
    import keras
    import tensorflow as tf

    from gradring.tensorflow import sync_replicas

    strategy = strategy_by(updates.LocalSGD(EVERY, outer))
    with strategy.scope():
        weight = tf.Variable([1.0, 2.0])
        optimizer = keras.optimizers.SGD(RATE)

    def replica_step() -> None:
        # As of a loss that is divided by the number of replicas.
        gradient = tf.constant([1.0, comm.rank - 2.0]) / comm.world_size
        optimizer.apply_gradients([(gradient, weight)])

    step = tf.function(lambda: strategy.run(replica_step))
    tf.config.run_functions_eagerly(eager)
    seen = []
    for _ in range(2 * EVERY + 1):
        step()
        seen.append(np.array(weight))
    tf.config.run_functions_eagerly(False)
    sync_replicas(tf.train.Checkpoint(weight=weight))
    return [*seen, np.array(weight)]


def expected_rounds(rank: int, world_size: int, outer: updates.Nesterov | None) -> Any:
    """The same by hand."""
    own = np.array([1.0, rank - 2.0])
    mean = np.array([1.0, np.mean(np.arange(world_size)) - 2.0])
    before, momentum, seen = np.array([1.0, 2.0]), np.zeros(2), []
    for steps in (EVERY, EVERY, 1):
        seen += [before - RATE * own * step for step in range(1, steps + 1)]
        moved = RATE * mean * steps
        if outer is None:
            before = before - moved
        else:
            momentum = outer.momentum * momentum + moved
            before = before - outer.learning_rate * (moved + outer.momentum * momentum)
        if steps == EVERY:
            seen[-1] = before
    return [*seen, before]


def local_fit(comm: Any, path: str) -> Any:
    """`fit` with callbacks that look at the replicas, in rounds that do not end with epochs."""
    import keras

    from gradring.tensorflow import callbacks

    differing = []

    class Look(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            found = comm.all_gather(np.asarray(self.model.get_weights()[0])[np.newaxis])
            differing.append(not (found[0] == found[1]).all())

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if comm.rank == 0:
                self.model.save_weights(path)

    keras.utils.set_random_seed(comm.rank)
    model = compiled(strategy_by(updates.LocalSGD(EVERY, OUTER)), "plain BN", "Adam")
    history = model.fit(
        dataset(),
        epochs=2,
        verbose=0,
        validation_data=dataset(count=BATCH),
        callbacks=[
            Look(),
            callbacks.CheckReplicas(every_steps=2 * STEPS - 1),
            keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=9.0),
        ],
    ).history
    predicted = np.sort(model.predict(dataset(), verbose=0), axis=0)
    weights = [np.asarray(weight) for weight in model.get_weights()]
    if comm.rank == 0:
        model.load_weights(path)
    saved = [np.asarray(weight) for weight in model.get_weights()]
    return {
        "history": history,
        "differing": differing,
        "weights": weights,
        "saved": saved,
        "predicted": predicted,
        "momenta": sum("outer_momentum" in v.path for v in model.optimizer.variables),
    }


def epochs(rule: updates.Rule) -> tuple[list[str], Any]:
    """What the log says of several epochs, and the weights afterwards.

    The last gradients of an epoch are not applied in it.
    """
    import keras

    said = kept_lines(logging.WARNING)
    keras.utils.set_random_seed(1)
    options = {"gradient_accumulation_steps": EVERY} if rule == updates.AllReduce() else {}
    model = compiled(strategy_by(rule), "mlp", "Adam", **options)
    model.fit(dataset(), epochs=3, verbose=0)
    return said, [np.asarray(weight) for weight in model.get_weights()]


def looked_at(comm: Any, path: str) -> Any:
    """A loop that saves, evaluates and checks in the middle of rounds."""
    import keras
    import tensorflow as tf

    from gradring.tensorflow import check_replicas, save

    keras.utils.set_random_seed(1)
    strategy = strategy_by(updates.LocalSGD(100))
    model = compiled(strategy, "mlp", "Adam")
    model.fit(dataset(), verbose=0, steps_per_epoch=1)
    x, y = samples(count=BATCH)

    def weights() -> Any:
        return [np.asarray(weight) for weight in model.get_weights()]

    def train() -> None:
        def replica_step() -> None:
            with tf.GradientTape() as tape:
                loss = model.compute_loss(y=y[comm.rank :: 2], y_pred=model(x[comm.rank :: 2]))
            found = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply(found, model.trainable_variables)

        strategy.run(replica_step)

    looks: dict[str, Callable[[], Any]] = {
        "save": lambda: save(model, path),
        "evaluate": lambda: model.evaluate(dataset(), verbose=0),
        "check_replicas": lambda: check_replicas(model.variables + model.optimizer.variables),
        "check_replicas, a model": lambda: check_replicas(model),
        "check_replicas, a checkpoint": lambda: check_replicas(tf.train.Checkpoint(m=model)),
    }
    seen = {}
    for name, look in looks.items():
        train()
        apart = weights()
        look()
        seen[name] = apart, weights()
    return seen


def checked(comm: Any) -> dict[str, Any]:
    """What a check says before and after one rank alone has changed a weight, or its momentum."""
    import keras
    import tensorflow as tf

    from gradring.errors import MismatchError
    from gradring.tensorflow import check_replicas
    from gradring.tensorflow.graph.model_variables import local_parts

    keras.utils.set_random_seed(1)
    strategy = strategy_by(updates.AllReduce())
    model = compiled(strategy, "mlp", "SGD momentum")
    model.fit(dataset(), verbose=0, steps_per_epoch=1)
    with strategy.scope():
        other = compiled(strategy, "mlp", "Adam")
        module = tf.Module()
        module.weight = tf.Variable([1.0], name="weight")

    def said(what: Any) -> str | None:
        try:
            check_replicas(what)
        except MismatchError as error:
            return str(error)
        return None

    momentum = next(v for v in model.optimizer.variables if "kernel" in v.path)
    found = {}
    for name, what, variable in (
        ("model", model, momentum),
        ("checkpoint", tf.train.Checkpoint(of_model=other), other.layers[0].kernel),
        ("module", module, module.weight),
    ):
        before = said(what)
        if comm.rank == 1:
            (part,) = local_parts(variable)
            part.assign_add(tf.ones_like(part))
        found[name] = before, said(what)
    return found


def elastic(comm: Any) -> Any:
    """Commits in the middle of rounds, of the two rules that have something to sync."""
    from gradring.tensorflow.elastic import State

    found = []
    for rule in (updates.LocalSGD(100, OUTER), updates.Primary()):
        strategy = strategy_by(rule)
        model = compiled(strategy, "mlp", "Adam")
        state = State(model=model)

        def step(strategy: Any = strategy, model: Any = model) -> None:
            def replica_step() -> None:
                import tensorflow as tf

                gradients = [
                    tf.fill(variable.shape, float(comm.rank + 1))
                    for variable in model.trainable_variables
                ]
                model.optimizer.apply(gradients)

            strategy.run(replica_step)

        step()
        state.commit()
        committed = state_of(model, model.optimizer)
        step()
        state.restore()
        restored = state_of(model, model.optimizer)
        # A round that began before the restoring would average into this.
        state.commit()
        found.append((committed, restored, state_of(model, model.optimizer)))
    return found


def refused(comm: Any) -> list[str]:
    rule = updates.LocalSGD()
    return [
        refusal(lambda: strategy_by("Primary")),  # type: ignore[arg-type]
        refusal(lambda: strategy_by(rule, check_gradients="warn")),
        refusal(lambda: strategy_by(rule, devices=["CPU:0", "CPU:1"])),
        refusal(lambda: strategy_by(updates.LocalSGD(comm.rank + 1))),
        refusal(lambda: compiled(strategy_by(rule), "mlp", "Adam", use_ema=True).fit(dataset())),
    ]


def sent() -> dict[str, int]:
    """What `fit` sends of weights of a few KiB, in bytes for each step."""
    import keras

    found = {}
    rules = (updates.AllReduce(), updates.LocalSGD(STEPS), updates.AllReduce(sync_every=STEPS))
    with join() as comm:
        for rule in rules:
            strategy = strategy_by(rule)
            with strategy.scope():
                model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(512)])
                model.compile(keras.optimizers.SGD(0.01), "mse")
            data = dataset().map(lambda x, y: (x, x[:, :1] * 0.0))
            model.fit(data.take(1), verbose=0, steps_per_epoch=1)
            before = comm.stats()["bytes_sent"]
            model.fit(data, verbose=0)
            found[str(rule)] = comm.stats()["bytes_sent"] - before
    return found


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = str(tmp_path_factory.mktemp("updates"))
    return run_ranks(
        job, 2, directory, chosen(request, "kind"), chosen(request, "whom"), timeout=280
    )


def assert_same(ours: Any, theirs: Any, tolerance: float | None = None) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        if tolerance is None:
            assert mine.tobytes() == other.tobytes()
        else:
            np.testing.assert_allclose(mine, other, rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", marked(KINDS, QUICK))
def test_primary_trains_as_all_reduce_does(ranks: Any, kind: str) -> None:
    for ours in (rank["primary"][kind] for rank in ranks):
        theirs = ranks[0]["all_reduce"][kind]
        for part in ("weights", "optimizer"):
            assert_same(ours[part], ranks[0]["primary"][kind][part])
            assert_same(ours[part], theirs[part], TOLERANCES[kind])
        assert ours["logs"] == ranks[0]["primary"][kind]["logs"]


@pytest.mark.slow
def test_primary_keeps_the_state_of_the_optimizer_on_the_chief() -> None:
    (chief, expected), (other, _) = run_ranks(by_loop, 2)
    assert_same(chief["weights"], other["weights"])
    for part in ("weights", "optimizer"):
        assert_same(chief[part], expected[part], 2e-5)
    iterations, _, *momenta = other["optimizer"]
    assert iterations == STEPS
    assert all(not momentum.any() for momentum in momenta)


@pytest.mark.slow
@pytest.mark.parametrize("whom", WHOM)
def test_sync_every_k_steps_is_training_with_batches_of_k_times_the_size(
    ranks: Any, whom: str
) -> None:
    for rank in ranks:
        ours, theirs = (rank["accumulated"][f"{name}{whom}"] for name in ("adds up", "large"))
        for part in ("weights", "optimizer"):
            assert_same(ours[part], theirs[part], 2e-5)
        assert ours["optimizer"][0] == STEPS // ACCUMULATED


def test_gradients_of_some_variables_are_added_up_apart_from_those_of_others(ranks: Any) -> None:
    for rank in ranks:
        assert rank["parts"] == [-2.0, -2.0, -1.0]


@pytest.mark.parametrize("kind", marked(KINDS, QUICK))
def test_averaging_after_every_step_of_sgd_is_all_reduce(ranks: Any, kind: str) -> None:
    for rank in ranks:
        assert_same(rank["every step"][kind]["weights"], ranks[0]["every step"][kind]["weights"])
        expected = rank["all_reduce"][kind]["weights"]
        assert_same(rank["every step"][kind]["weights"], expected, TOLERANCES[kind])


@pytest.mark.parametrize("name", ["plain", "plain, eagerly", "outer", "outer, eagerly"])
def test_rounds_of_local_steps_end_as_they_do_by_hand(ranks: Any, name: str) -> None:
    for rank, found in enumerate(ranks):
        expected = expected_rounds(rank, len(ranks), OUTER if "outer" in name else None)
        assert_same(found["rounds"][name], [np.float32(value) for value in expected], 1e-5)


def test_replicas_of_fit_differ_inside_rounds_and_agree_after_epochs(ranks: Any) -> None:
    first, second = (rank["fit"] for rank in ranks)
    of_an_epoch = [(step + 1) % EVERY != 0 for step in range(STEPS)]
    assert first["differing"] == second["differing"] == 2 * of_an_epoch
    assert first["history"] == second["history"]
    assert first["momenta"] == 5
    assert_same(first["weights"], second["weights"])
    assert_same(first["saved"], second["weights"])
    assert_same([first["predicted"]], [second["predicted"]])


@pytest.mark.parametrize("rule", RULES_OF_EPOCHS, ids=str)
def test_states_of_optimizers_that_differ_by_a_rule_end_no_fit_and_are_no_warning(
    ranks: Any, rule: updates.Rule
) -> None:
    for rank in ranks:
        said, weights = rank["epochs"][str(rule)]
        assert said == []
        assert_same(weights, ranks[0]["epochs"][str(rule)][1])


@pytest.mark.parametrize("what", ["model", "checkpoint", "module"])
def test_a_check_of_a_model_names_the_variable_that_differs(ranks: Any, what: str) -> None:
    for rank in ranks:
        before, after = rank["checked"][what]
        assert before is None
        assert re.search(r"the replicas differ\. '\d+/.*(kernel|weight).*' is the first of", after)
        assert "rank 1 on " in after and "has other contents than rank 0" in after


@pytest.mark.parametrize(
    "look",
    [
        *("save", "evaluate"),
        *("check_replicas", "check_replicas, a model", "check_replicas, a checkpoint"),
    ],
)
def test_who_looks_at_a_model_in_a_round_sees_the_mean(ranks: Any, look: str) -> None:
    (first, after), (second, other) = (rank["looked at"][look] for rank in ranks)
    assert any((mine != theirs).any() for mine, theirs in zip(first, second, strict=True))
    assert_same(after, other)
    means = [(mine + theirs) / 2 for mine, theirs in zip(first, second, strict=True)]
    assert_same(after, means, 1e-6)


@pytest.mark.parametrize("rule", ["LocalSGD", "Primary"])
def test_commits_are_the_same_on_all_ranks_and_end_rounds(ranks: Any, rule: str) -> None:
    first, second = (rank["elastic"][rule == "Primary"] for rank in ranks)
    for step, (mine, theirs) in enumerate(zip(first, second, strict=True)):
        assert_same(mine["weights"], theirs["weights"])
        assert_same(mine["weights"], first[0]["weights"], None if step else 0.0)
        if rule == "Primary":
            assert_same(mine["optimizer"], theirs["optimizer"])
            assert any(momentum.any() for momentum in theirs["optimizer"][2:])


def test_what_a_rule_cannot_do_is_refused(ranks: Any) -> None:
    for rank in ranks:
        no_rule, check, devices, other, averaging = rank["refused"]
        assert no_rule.startswith("ConfigError: update='Primary' is no update rule")
        assert check.startswith("ConfigError: check_gradients='warn' looks at gradients")
        assert "which has 2 local devices: only AllReduce() trains several" in devices
        assert other.startswith("MismatchError: rank 1 on ")
        assert averaging.startswith("ConfigError: use_ema=True of ")


@pytest.mark.slow
def test_nothing_of_the_weights_travels_inside_a_round() -> None:
    for found in run_ranks(sent, 2):
        all_reduce, local, accumulated = found.values()
        assert local < all_reduce / 10
        assert accumulated < all_reduce / 10


@pytest.mark.skipif(importlib.util.find_spec("tf_keras") is None, reason="needs tf_keras")
def test_optimizers_of_tf_keras_refuse_other_rules() -> None:
    (said,) = run_ranks(legacy, 1, env={"TF_USE_LEGACY_KERAS": "1"})
    assert said.startswith("ConfigError: update=Primary(sync_every=1) works in optimizers of Keras")


def legacy() -> str:
    import tensorflow as tf

    from gradring.errors import ConfigError

    with join():
        strategy = strategy_by(updates.Primary())
        with strategy.scope():
            weight = tf.Variable(1.0)
            optimizer = tf.keras.optimizers.SGD(0.1)
        try:
            strategy.run(lambda: optimizer.apply_gradients([(tf.constant(1.0), weight)]))
        except ConfigError as error:
            return f"ConfigError: {error}"
        return "not refused"
