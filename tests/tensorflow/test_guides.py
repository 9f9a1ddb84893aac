"""Habits of guides and notebooks around the strategy, which it must not mind.

They make a strategy for each section, compile outside of its scope, and give callbacks to the chief
alone.
"""

import gc
import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradring.errors import RestoreError, SaveError
from gradring.machine.ports import free_ports
from gradring.testing import run_ranks
from support.chosen import chosen, marked
from support.keras_models import needs_fit
from support.tf_worker import take_one_thread

pytestmark = needs_fit

EPOCHS = 3


def data() -> tuple[Any, Any]:
    x = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
    return x, x[:, :1] + 1


def make_model() -> Any:
    import keras

    layers = keras.layers
    return keras.Sequential(
        [layers.Input((4,)), layers.Dense(3), layers.BatchNormalization(), layers.Dense(1)]
    )


def fitted(model: Any, **kwargs: Any) -> Any:
    """What ranks must agree about after `fit`: logs and weights."""
    options = {"batch_size": 8, "epochs": EPOCHS, "verbose": 0, "shuffle": False}
    history = model.fit(*data(), **options, **kwargs)
    return {"logs": history.history, "weights": [w.tolist() for w in model.get_weights()]}


def on_each_rank(
    addresses: list[str], directory: str, ways: list[str], owners: list[str], stoppers: list[int]
) -> Any:
    """Everything in one process, because starting TensorFlow takes longer than any of it."""
    import keras

    take_one_thread()
    # As a launcher of TensorFlow's own strategy would have it: every rank has its address.
    rank = int(os.environ["GRADRING_RANK"])
    for name in ("GRADRING_RANK", "GRADRING_WORLD_SIZE", "GRADRING_RENDEZVOUS"):
        del os.environ[name]
    task = {"type": "worker", "index": rank}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
    keras.utils.set_random_seed(rank)
    return {
        "sections": sections(rank),
        "compiled": {where: compiled(where) for where in WAYS if where in (WAYS[0], *ways)},
        "callbacks": callbacks(rank, Path(directory), owners, stoppers),
        "disagreements": disagreements(rank),
    }


def sections(rank: int) -> Any:
    import gradring
    from gradring.tensorflow import CustomCollectiveStrategy, all_gather

    first = CustomCollectiveStrategy().communicator
    if rank == 0:
        gc.collect()  # the others still have theirs
    models = []
    for _ in range(2):
        strategy = CustomCollectiveStrategy()
        with strategy.scope():
            model = make_model()
            model.compile("sgd", "mse")
        models.append(model)
    results = [fitted(model) for model in models]
    with pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        logger = logging.getLogger("gradring")
        patch.setattr(logger, "warning", lambda text, *values: said.append(text % values))
        outsider = make_model()
        outsider.compile("sgd", "mse")
        outsider.fit(*data(), verbose=0)
        models[0].fit(*data(), verbose=0)
    with gradring.init() as same:
        groups = [same, *(model.distribute_strategy.communicator for model in models)]
        shared = all(group is first for group in groups)
    again = fitted(models[0])
    gathered = all_gather([[rank]]).numpy().tolist()
    with pytest.raises(gradring.errors.ConfigError) as refused:
        gradring.init(wire_dtype="bfloat16")
    first.close()
    strategy = CustomCollectiveStrategy(communicator=gradring.init(wire_dtype="bfloat16"))
    closed = strategy.communicator is not first
    total = float(strategy.reduce("SUM", 1.0, axis=None))
    strategy.communicator.abort("enough")
    with pytest.raises(gradring.errors.AbortedError):
        strategy.reduce("SUM", 1.0, axis=None)
    strategy = CustomCollectiveStrategy()
    return {
        "results": [*results, again],
        "shared": shared,
        "said": said,
        "gathered": gathered,
        "refused": str(refused.value),
        "after close": (closed, total),
        "after failure": float(strategy.reduce("SUM", 1.0, axis=None)),
    }


WAYS = ("in the scope", "outside", "objects made outside", "fit in the scope", "mixed", "own loop")
#: In every run of the tests: all inside, all outside, and what Keras has no part in.
QUICK_WAYS = ("in the scope", "outside", "own loop")


def compiled(where: str) -> Any:
    """A model made in the scope, whose other parts are made elsewhere."""
    import contextlib

    import keras
    import tensorflow as tf

    from gradring.tensorflow import CustomCollectiveStrategy

    strategy = CustomCollectiveStrategy()
    optimizer: Any = "adam"
    metric: Any = "mae"
    if where != "in the scope":
        optimizer = keras.optimizers.Adam()
        metric = keras.metrics.MeanAbsoluteError(name="mae")
    if where == "mixed":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    with strategy.scope():
        model = make_model()
        model.set_weights([np.full(w.shape, 0.5) for w in model.get_weights()])
    if where == "own loop":
        return own_loop(strategy, model, optimizer)
    with strategy.scope() if where == "in the scope" else contextlib.nullcontext():
        model.compile(optimizer, "mse", metrics=[metric])
    with strategy.scope() if where == "fit in the scope" else contextlib.nullcontext():
        result = fitted(model)
    steps = model.optimizer.iterations
    if where == "mixed":
        steps = model.optimizer.inner_optimizer.iterations
    return {
        **result,
        "steps": int(steps.numpy()),
        "ours": isinstance(steps.value, tf.distribute.DistributedValues),
    }


def own_loop(strategy: Any, model: Any, optimizer: Any) -> Any:
    import tensorflow as tf

    def replica_step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2) / 2
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    @tf.function  # type: ignore[untyped-decorator]
    def step(batch: Any) -> None:
        strategy.run(replica_step, batch)

    dataset = tf.data.Dataset.from_tensor_slices(data()).batch(8)
    for batch in strategy.experimental_distribute_dataset(dataset):
        step(batch)
    return {
        "weights": [w.tolist() for w in model.get_weights()],
        "logs": {},
        "steps": int(optimizer.iterations.numpy()),
        "ours": isinstance(optimizer.iterations.value, tf.distribute.DistributedValues),
    }


def callbacks(rank: int, directory: Path, owners: list[str], stoppers: list[int]) -> Any:
    import keras

    from gradring.tensorflow import CustomCollectiveStrategy

    strategy = CustomCollectiveStrategy()
    kinds = keras.callbacks

    def train(on: int | None, *given: Any, traced: bool = True) -> Any:
        """With callbacks on one rank, or on all; a graph is for weights that are compared."""
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = make_model()
            model.compile("adam", "mse", metrics=["mae"], run_eagerly=not traced)
        own = list(given) if on in (None, rank) else []
        return model, fitted(model, callbacks=own)

    class Stop(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = True

    class Fail(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                raise InterruptedError

    chief, last = directory / "chief.keras", directory / "last.weights.h5"
    backup, log, shared = directory / "backup", directory / "log.csv", directory / "shared.keras"
    found: dict[str, Any] = {}
    model, found["plain"] = train(None)
    if "chief" in owners:
        found["chief"] = train(
            0, kinds.ModelCheckpoint(chief), kinds.CSVLogger(log), kinds.BackupAndRestore(backup)
        )[1]
        # Nobody waits for the chief's disk, but when `fit` returns, all is there.
        loaded = same_weights(keras.models.load_model(chief), model)
        found["files of chief"] = loaded and not backup.exists()
        with pytest.raises(SaveError, match=r"rank 0 on \S+ could not save a checkpoint of fit: "):
            train(0, kinds.ModelCheckpoint(chief / "below a file.keras"), traced=False)
    if "last" in owners:
        weights_only = kinds.ModelCheckpoint(last, save_weights_only=True, save_freq=3)
        found["last"] = train(1, weights_only)[1]
        found["files of last"] = last.exists()
    if "all" in owners:
        found["all"] = train(None, kinds.ModelCheckpoint(shared))[1]
        found["files of all"] = same_weights(keras.models.load_model(shared), model)
    with pytest.raises(InterruptedError):
        train(None, *([kinds.BackupAndRestore(backup)] if rank == 0 else []), Fail())
    strategy.communicator.barrier()
    with strategy.scope():
        found["resumed"] = train(0, kinds.BackupAndRestore(backup))[1]
    torn = kinds.BackupAndRestore(directory / "torn")
    if rank == 0:
        (directory / "torn").mkdir()
        (directory / "torn" / "latest.weights.h5").write_bytes(b"torn")
    with pytest.raises(RestoreError) as raised:
        train(0, torn, traced=False)
    found["torn"] = str(raised.value)
    for on in stoppers:
        found[f"stopped by {on}"] = train(on, Stop(), traced=False)[1]
    # Saved by the chief alone, restored by all.
    if rank == 0:
        model.save_weights(directory / "by-hand.weights.h5")
        with strategy.scope():
            model.save(directory / "by-hand.keras")
    strategy.communicator.barrier()
    with strategy.scope():
        restored = keras.models.load_model(directory / "by-hand.keras")
    found["by hand"] = same_weights(restored, model)
    restored.load_weights(directory / "by-hand.weights.h5")
    found["restored"] = fitted(restored)
    return found


def same_weights(these: Any, those: Any) -> bool:
    pairs = zip(these.get_weights(), those.get_weights(), strict=True)
    return all(np.array_equal(this, that) for this, that in pairs)


def disagreements(rank: int) -> Any:
    """Callbacks that change the training of one rank alone; each ends its group."""
    import keras

    from gradring.errors import MismatchError
    from gradring.tensorflow import CustomCollectiveStrategy

    class Stop(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_training = batch == 1

    class Rate(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.model.optimizer.learning_rate = 0.5

    said = []
    for callback in (Rate(), Stop()):
        strategy = CustomCollectiveStrategy()
        with strategy.scope():
            model = make_model()
            model.compile(keras.optimizers.SGD(0.25), "mse", run_eagerly=True)
        with pytest.raises(MismatchError) as raised:
            fitted(model, callbacks=[callback] if rank == 0 else [])
        said.append(str(raised.value))
        strategy.communicator.close()
    return said


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    directory = str(tmp_path_factory.mktemp("guides"))
    cases = [chosen(request, argument) for argument in ("where", "owner", "on")]
    return run_ranks(on_each_rank, 2, addresses, directory, *cases, timeout=400)


def test_a_strategy_in_each_section_shares_the_group(ranks: Any) -> None:
    first, second = (found["sections"] for found in ranks)
    assert first["results"] == second["results"]
    for found in (first, second):
        assert found["shared"]
        assert found["gathered"] == [[0], [1]]
        assert "wire_dtype='bfloat16', not None" in found["refused"]


def test_a_model_that_is_made_outside_and_trained_alone_is_named(ranks: Any) -> None:
    first, second = (found["sections"]["said"] for found in ranks)
    (said,) = first
    assert "each of 2 ranks trains" in said and "alone: no gradient that SGD applies" in said
    assert second == []


def test_a_closed_or_failed_group_is_followed_by_a_new_one(ranks: Any) -> None:
    for found in ranks:
        assert found["sections"]["after close"] == (True, 2.0)
        assert found["sections"]["after failure"] == 2.0


@pytest.mark.parametrize("where", marked(WAYS, QUICK_WAYS))
def test_what_is_made_outside_of_the_scope_trains_as_if_it_were_inside(
    ranks: Any, where: str
) -> None:
    first, second = (found["compiled"][where] for found in ranks)
    assert first == second
    assert first["ours"] and first["steps"] == (4 if where == "own loop" else 4 * EPOCHS)
    if where not in ("mixed", "own loop"):
        expected = ranks[0]["compiled"]["in the scope"]
        assert first["weights"] == expected["weights"]
        assert first["logs"] == expected["logs"]


@pytest.mark.parametrize("owner", marked(("chief", "last", "all"), ("chief",)))
def test_a_callback_of_one_rank_needs_nobody(ranks: Any, owner: str) -> None:
    for found in ranks:
        found = found["callbacks"]
        assert found[owner] == found["plain"]
        assert found[f"files of {owner}"]


def test_all_resume_from_the_backup_of_a_chief_that_has_it_alone(ranks: Any) -> None:
    for found in ranks:
        resumed = found["callbacks"]["resumed"]
        assert len(resumed["logs"]["loss"]) == EPOCHS - 2
        assert resumed["weights"] == found["callbacks"]["plain"]["weights"]


def test_a_backup_that_the_chief_cannot_read_is_an_error_on_all(ranks: Any) -> None:
    for found in ranks:
        said = found["callbacks"]["torn"]
        assert said.startswith("rank 0 on ") and "could not restore a backup of fit: " in said


@pytest.mark.parametrize("on", marked((0, 1), (1,)))
def test_one_rank_can_stop_all_at_the_end_of_an_epoch(ranks: Any, on: int) -> None:
    for found in ranks:
        assert len(found["callbacks"][f"stopped by {on}"]["logs"]["loss"]) == 1


def test_what_the_chief_saves_alone_is_restored_by_all(ranks: Any) -> None:
    assert ranks[0]["callbacks"]["restored"] == ranks[1]["callbacks"]["restored"]
    assert all(found["callbacks"]["by hand"] for found in ranks)


def test_a_callback_that_changes_one_rank_alone_is_an_error_on_all(ranks: Any) -> None:
    for rank, found in enumerate(ranks):
        rate, stopped = found["disagreements"]
        assert f"fit on rank {rank} of" in rate
        assert f"the learning rate is {0.25 if rank else 0.5} here, and from 0.25 to 0.5" in rate
        assert "a callback has set stop_training after batch 1" in stopped
        assert rank or "on rank 0 on " in stopped.partition(", and others train on")[0]
