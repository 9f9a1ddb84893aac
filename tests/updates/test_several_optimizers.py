"""Several optimizers at the parameter servers, such as those of a GAN."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gradring import _native, updates
from gradring.errors import ConfigError, GradringError
from gradring.testing import run_ranks
from support.commands import succeeded
from support.keras_models import HAS_MULTI_OPTIMIZER, needs_fit, strategy_of
from support.served import RATE, served, serving
from support.tf_worker import join, refusal

pytestmark = needs_fit

ROWS, STEPS = 16, 12
#: Discriminator steps for one of the generator, and the step in which the generator begins.
DISCRIMINATOR_STEPS, LATE = 2, 4
WAYS = ("graph", "graphs", "eager", "late")


def job() -> dict[str, Any]:
    with join(reproducible=True) as comm:
        return {
            "alone": {way: gan(None, comm, way) for way in WAYS},
            "all-reduce": {way: gan(strategy_of(comm), comm, way) for way in WAYS},
            "served": {way: served_gan(comm, way) for way in WAYS},
            "began": began(comm),
            "refused": refused(comm),
            "crossed": crossed(comm),
            "of layers": of_layers(comm) if HAS_MULTI_OPTIMIZER else None,
        }


def gan(strategy: Any, comm: Any, way: str) -> Any:
    """The weights of both models; ranks divide each batch, and one that is alone has all of it."""
    import keras
    import tensorflow as tf

    is_alone, strategy = strategy is None, strategy or tf.distribute.get_strategy()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        generator = dense(4, 3)
        discriminator = dense(3, 1)
        by_generator = keras.optimizers.Adam(0.01)
        by_discriminator = keras.optimizers.SGD(0.05, momentum=0.5)
    entropy = keras.losses.BinaryCrossentropy(from_logits=True, reduction="sum")

    def said(values: Any, real: float) -> Any:
        found = discriminator(values)
        return entropy(tf.fill(tf.shape(found), real), found) / ROWS

    def of_discriminator(noise: Any, real: Any) -> None:
        with tf.GradientTape() as tape:
            loss = said(real, 1.0) + said(generator(noise), 0.0)
        own = discriminator.trainable_variables
        by_discriminator.apply_gradients(zip(tape.gradient(loss, own), own, strict=True))

    def of_generator(noise: Any) -> None:
        with tf.GradientTape() as tape:
            loss = said(generator(noise), 1.0)
        own = generator.trainable_variables
        by_generator.apply_gradients(zip(tape.gradient(loss, own), own, strict=True))

    def both(noise: Any, real: Any) -> None:
        for _ in range(DISCRIMINATOR_STEPS):
            of_discriminator(noise, real)
        of_generator(noise)

    def each(noise: Any, real: Any, step: int) -> None:
        for _ in range(DISCRIMINATOR_STEPS):
            train_discriminator(noise, real)
        if way != "late" or step >= LATE:
            train_generator(noise)

    def replicated(act: Any) -> Any:
        run = lambda *args: strategy.run(act, args=args)  # noqa: E731
        return run if way == "eager" else tf.function(run)

    train_both = replicated(both)
    train_discriminator, train_generator = replicated(of_discriminator), replicated(of_generator)
    random = np.random.default_rng(3)
    for step in range(STEPS):
        batch = [random.standard_normal((ROWS, width), np.float32) for width in (4, 3)]
        own = [part if is_alone else part[comm.rank :: comm.world_size] for part in batch]
        noise, real = map(tf.constant, own)
        if way == "graph":
            train_both(noise, real)
        else:
            each(noise, real, step)
    return [np.asarray(it) for model in (generator, discriminator) for it in model.get_weights()]


def dense(inputs: int, outputs: int) -> Any:
    import keras

    layers = [keras.layers.Dense(8, "tanh"), keras.layers.Dense(outputs)]
    return keras.Sequential([keras.layers.Input((inputs,)), *layers])


def served_gan(comm: Any, way: str) -> Any:
    with served(comm, updates.ParameterServer(), servers=2) as strategy:
        weights = gan(strategy, comm, way)
        stats = strategy.update_stats()
    return weights, stats


def weights_of(strategy: Any, names: str, initial: float = 1.0) -> dict[str, Any]:
    """A step of each of these variables by an optimizer of its own and a gradient of 1."""
    import keras
    import tensorflow as tf

    def step_of(name: str) -> Any:
        with strategy.scope():
            weight = tf.Variable([initial], name=name)
            optimizer = keras.optimizers.SGD(RATE)

        def step() -> float:
            one = tf.constant([1.0])
            strategy.run(lambda: optimizer.apply_gradients([(one, weight)]))
            return float(weight.numpy()[0])

        step.weight = weight  # type: ignore[attr-defined]
        return step

    return {name: step_of(name) for name in names}


def began(comm: Any) -> Any:
    """Workers with other initial weights, eagerly: all train those of one of them."""
    made: list[Any] = []
    with serving(comm, updates.ParameterServer(), made=made):
        strategy = a_strategy(updates.ParameterServer())
        steps = weights_of(strategy, "ab", initial=float(comm.rank)).values()
        seen = [[step() for step in steps] for _ in range(3)]
        strategy.leave()
        stats = strategy.update_stats()
    return seen, stats, [summary_of(one.stats()) for one in made]


def summary_of(stats: Any) -> str:
    from gradring.tensorflow.cluster.serving import summary

    return summary(stats)


def a_strategy(rule: updates.ParameterServer) -> Any:
    from gradring.tensorflow import CustomCollectiveStrategy

    return CustomCollectiveStrategy(update=rule)


def of_layers(comm: Any) -> Any:
    """Weights of a `MultiOptimizer` after `fit`: of one process, and of workers at servers."""
    import keras
    import tensorflow as tf

    kinds = keras.optimizers
    x = np.random.default_rng(0).normal(size=(2 * ROWS, 4)).astype("float32")

    def trained(strategy: Any) -> Any:
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = dense(4, 1)
            by_path = {model.layers[1].kernel.path: kinds.Adam(0.01)}
            optimizers = kinds.OptimizerMap(kinds.SGD(0.05, momentum=0.5), by_path)
            model.compile(kinds.MultiOptimizer(optimizers), "mse")
        model.fit(tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(8), epochs=2, verbose=0)
        return model.get_weights()

    alone = trained(tf.distribute.get_strategy())
    with served(comm, updates.ParameterServer()) as strategy:
        return alone, trained(strategy), strategy.update_stats()


def refused(comm: Any) -> dict[str, str]:
    """What a worker hears that uses its optimizers in another order, or one too many."""
    import keras
    import tensorflow as tf

    rule = updates.ParameterServer(staleness=None)
    said = {}
    with serving(comm, rule):
        strategy = a_strategy(rule)
        steps = weights_of(strategy, "ab")
        for step in steps.values():
            step()
        said["order"] = refusal(weights_of(a_strategy(rule), "ba")["b"])
        other = keras.optimizers.SGD(RATE)
        again = [(tf.constant([1.0]), steps["a"].weight)]
        said["shared"] = refusal(lambda: strategy.run(lambda: other.apply_gradients(again)))
        strategy.leave()
        said["left"] = refusal(weights_of(strategy, "c")["c"])
    return said


def crossed(comm: Any) -> str:
    """The error of ranks that use their optimizers in different orders."""
    rule = updates.ParameterServer()
    said = ""
    with serving(comm, rule):
        os.environ["GRADRING_STALL_TIMEOUT_S"] = "2"
        strategy = a_strategy(rule)
        steps = weights_of(strategy, "ab")
        for name in "ab":
            steps[name]()
        try:
            for name in "ab" if comm.rank == 0 else "ba":
                steps[name]()
        except GradringError as error:
            said = f"{type(error).__name__}: {error}"
        comm.barrier()
        for optimizer in strategy.extended.updates._optimizers:
            optimizer.client.close()
        del os.environ["GRADRING_STALL_TIMEOUT_S"]
        # New ones in their places go on, and the servers end well.
        strategy = a_strategy(rule)
        for step in weights_of(strategy, "ab").values():
            step()
        strategy.leave()
    return said


@pytest.fixture(scope="module")
def ranks() -> Any:
    return run_ranks(job, 2, timeout=280)


@pytest.mark.parametrize("way", WAYS)
def test_a_gan_trains_as_by_all_reduce(ranks: Any, way: str) -> None:
    for rank in ranks:
        weights, stats = rank["served"][way]
        for ours, theirs in zip(weights, ranks[0]["all-reduce"][way], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
        for ours, alone in zip(weights, ranks[0]["alone"][way], strict=True):
            np.testing.assert_allclose(ours, alone, rtol=0, atol=1e-5)
        of_generator = STEPS - LATE if way == "late" else STEPS
        pushes = [one["pushes"] for one in stats["optimizers"]]
        assert pushes == [STEPS * DISCRIMINATOR_STEPS, of_generator]
        assert [one["version"] - 1 for one in stats["optimizers"]] == pushes
        assert stats["pushes"] == sum(pushes)


@pytest.mark.skipif(not HAS_MULTI_OPTIMIZER, reason="needs Keras 3.15")
def test_servers_train_layers_by_optimizers_of_their_own(ranks: Any) -> None:
    for rank in ranks:
        alone, together, stats = rank["of layers"]
        for one, other in zip(alone, together, strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)
        assert len(stats["optimizers"]) == 2


def test_workers_that_begin_with_other_weights_stay_in_step(ranks: Any) -> None:
    found = [rank["began"][0] for rank in ranks]
    assert found[0] == found[1]
    for name in range(2):
        seen = [step[name] for step in found[0]]
        first = seen[0] + RATE
        assert first in (0.0, 1.0)
        # In the first update there is only the gradient of the worker whose weights they are.
        assert seen == [first - RATE * count for count in (1, 3, 5)]


def test_counts_are_of_all_optimizers(ranks: Any) -> None:
    for rank in ranks:
        stats = rank["began"][1]
        assert (stats["version"], stats["pushes"], stats["pulls"]) == (4, 6, stats["pulls"])
        assert [one["pushes"] for one in stats["optimizers"]] == [3, 3]
        assert stats["bytes_sent"] == sum(one["bytes_sent"] for one in stats["optimizers"])
    (summary,) = ranks[0]["began"][2]
    assert "version 4" in summary and "6 updates of 12 gradients, 2 optimizers" in summary


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("order", "MismatchError: .*all workers must begin to use them in one order"),
        (
            "shared",
            "ConfigError: .*: sgd_.* trains a under .*, and so does sgd.*: the servers keep a",
        ),
        ("left", "AbortedError: worker 1 of 2 has left the servers"),
    ],
)
def test_what_servers_cannot_do_is_refused_and_named(ranks: Any, what: str, words: str) -> None:
    assert re.match(words, ranks[1]["refused"][what])


def test_workers_that_use_their_optimizers_in_other_orders_end_with_an_error(ranks: Any) -> None:
    for rank in ranks:
        assert rank["crossed"].startswith("CollectiveTimeoutError: ")
        assert "let all workers use several optimizers in one order" in rank["crossed"]


def test_equal_models_in_another_order_have_other_names() -> None:
    from gradring.tensorflow.rules.served_optimizer import names_of

    paths = ("dense/kernel", "dense_1/kernel")
    first, second = (SimpleNamespace(path=path, name=path) for path in paths)
    assert names_of([first], []) == names_of([second], []) == ["dense/kernel"]
    assert names_of([second], [first]) == ["dense#1/kernel"]
    assert names_of([first], [second]) == ["dense#0/kernel"]


def test_a_job_has_a_bounded_number_of_optimizers() -> None:
    from gradring.tensorflow.cluster.serving import config_of

    addresses = ["127.0.0.1:1"]
    with pytest.raises(ConfigError, match="optimizer=64 is not less than 64, the number that"):
        _native.ParameterClient(
            worker=0, addresses=addresses, config=config_of(addresses), optimizer=64
        )


PROGRAM = """
import json, os, signal, sys
from pathlib import Path

import keras
import tensorflow as tf

from gradring import updates
from gradring.tensorflow import CustomCollectiveStrategy

REPLICAS, LOST = int(sys.argv[1]), sys.argv[2]
TASK = json.loads(os.environ["TF_CONFIG"])["task"]
WHO, LIFE = f"{TASK['type']}-{TASK['index']}", int(os.environ["GRADRING_RESTART"])
Path(f"{WHO}.partial").write_text(str(os.getpid()))
Path(f"{WHO}.partial").rename(f"pid-{WHO}-{LIFE}")
kept = {"replicas": 1} if REPLICAS else {"snapshots": "snapshots"}
strategy = CustomCollectiveStrategy(update=updates.ParameterServer(snapshot_every=5, **kept))
with strategy.scope():
    weights = [tf.Variable([10.0, 20.0], name=name) for name in "ab"]
    optimizers = [keras.optimizers.SGD(0.01, momentum=0.5) for _ in weights]


@tf.function
def step():
    def replica_step():
        for weight, optimizer in zip(weights, optimizers):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weight**2) / strategy.num_replicas_in_sync
            optimizer.apply_gradients([(tape.gradient(loss, weight), weight)])

    strategy.run(replica_step)


versions = []
while not versions or min(versions[-1]) < 60:
    step()
    versions.append([one["version"] for one in strategy.update_stats()["optimizers"]])
    if WHO == "worker-0" and len(versions) == 20:
        os.kill(int(Path(f"pid-{LOST}-0").read_text()), signal.SIGKILL)
found = {"versions": versions, "weights": [weight.numpy().tolist() for weight in weights]}
Path(f"found-{WHO}").write_text(json.dumps(found))
"""


@pytest.mark.parametrize(
    ("replicas", "lost"),
    [
        (0, "ps-1"),
        pytest.param(1, "ps-1", marks=pytest.mark.slow),
        pytest.param(0, "ps-0", marks=pytest.mark.slow),
        pytest.param(1, "ps-0", marks=pytest.mark.slow),
        pytest.param(1, "worker-1", marks=pytest.mark.slow),
    ],
)
def test_both_optimizers_go_on_when_a_process_is_lost(
    replicas: int, lost: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    command = ["run", "-np", 2, "--ps", 2, "--max-restarts", 2, "--", sys.executable, "train.py"]
    ended = succeeded(*command, replicas, lost, cwd=tmp_path, timeout=280)
    assert len(re.findall(r"failed \(killed by SIGKILL\); .* again", ended.stderr)) == 1
    found = json.loads((tmp_path / "found-worker-0").read_text())
    for versions in zip(*found["versions"], strict=True):
        changes = np.diff(versions)
        # From the last snapshot, and not from the beginning; with copies, from where they were.
        assert min(changes) >= (0 if replicas or lost == "worker-1" else -9)
    assert max(abs(it) for weight in found["weights"] for it in weight) < 10
    assert re.search(r"ps 0 ends: .*, 2 optimizers", ended.stderr)
