"""Arguments of `fit`, `evaluate` and `predict` on the ranks: those that may differ, and others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradring.testing import run_ranks
from support.keras_models import needs_fit

pytestmark = needs_fit

ROWS, BATCH = 32, 8

#: By case: the loop, and what it is given beside on rank 0 and on rank 1.
Case = tuple[str, dict[str, Any], dict[str, Any]]


def data() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)
    return x, x[:, :1]


def differing() -> dict[str, Case]:
    """By what the error says of rank 1 and of rank 0."""
    import keras

    kinds, x_and_y = keras.callbacks, data()
    weights = {0: 1.0, 1: 2.0}

    class Swap(keras.callbacks.SwapEMAWeights):  # type: ignore[misc]
        """One of a program's own."""

    def validated(**given: Any) -> dict[str, Any]:
        return {"validation_data": x_and_y, **given}

    def of(*callbacks: Any) -> dict[str, Any]:
        return {"callbacks": [*callbacks]}

    best = kinds.EarlyStopping("loss", restore_best_weights=True)
    return {
        "epochs=2|3": ("fit", {"epochs": 3}, {"epochs": 2}),
        "initial_epoch=1|0": ("fit", {"epochs": 2}, {"epochs": 2, "initial_epoch": 1}),
        "steps_per_epoch=2|None": ("fit", {}, {"steps_per_epoch": 2}),
        "batch_size=16|8": ("fit", {}, {"batch_size": 16}),
        "shuffle=0|1": ("fit", {}, {"shuffle": False}),
        "validation_split=0|0.25": ("fit", {"validation_split": 0.25}, {}),
        "validation_data=None|given": ("fit", validated(), {}),
        "validation_steps=1|None": ("fit", validated(), validated(validation_steps=1)),
        "validation_freq=[1, 3]|1": ("fit", validated(), validated(validation_freq=[1, 3])),
        "class_weight=None|{0: 1, 1: 2}": ("fit", {"class_weight": weights}, {}),
        "sample_weight=given|None": ("fit", {}, {"sample_weight": np.ones(ROWS)}),
        "callbacks EarlyStopping(restore_best_weights=True)=1|0": ("fit", {}, of(best)),
        "callbacks SwapEMAWeights=1|0": ("fit", {}, of(Swap())),
        "callbacks SwapEMAWeights=0|1": ("fit", of(kinds.SwapEMAWeights()), {}),
        "steps=1|None": ("evaluate", {}, {"steps": 1}),
        "batch_size=4|8": ("predict", {}, {"batch_size": 4}),
    }


def equal(directory: Path) -> dict[str, Case]:
    """What trains, evaluates and predicts, though it is not the same."""
    import keras
    import tensorflow as tf

    kinds = keras.callbacks

    class CommitState(keras.callbacks.Callback):  # type: ignore[misc]
        """A program's own, of the name of another one."""

    class LogRate(keras.callbacks.LearningRateScheduler):  # type: ignore[misc]
        """Shows the rate, on one rank."""

    batches = tf.data.Dataset.from_tensor_slices(data()).batch(BATCH)
    many = {index: 1.0 + index / 100 for index in range(100)}
    ours = [kinds.ModelCheckpoint(directory / "model.keras"), kinds.CSVLogger(directory / "log")]
    ours += [kinds.TerminateOnNaN(), kinds.LambdaCallback()]
    return {
        "verbose": ("fit", {"verbose": 2}, {}),
        "numbers of numpy": ("fit", {"epochs": np.int64(1)}, {"initial_epoch": np.int32(0)}),
        "weights of numpy": (
            "fit",
            {"class_weight": many},
            {"class_weight": {np.int64(i): np.float64(w) for i, w in reversed(many.items())}},
        ),
        "numbers but for rounding": (
            "fit",
            {"class_weight": {0: 0.1 + 0.2, 1: 2}},
            {"class_weight": {0: np.float32(0.3), 1: 2.0}},
        ),
        "spellings of what Keras does": ("fit", {"batch_size": 32}, {"batch_size": None}),
        "callbacks of a program's own": (
            "fit",
            {"callbacks": [CommitState(), LogRate(lambda _, rate: rate)]},
            {},
        ),
        "callbacks that show or save": ("fit", {"callbacks": ours}, {}),
        "one callback, one list": (
            "fit",
            {"callbacks": kinds.LearningRateScheduler(lambda _: 0.1)},
            {"callbacks": [kinds.LearningRateScheduler(lambda _: 0.1)]},
        ),
        "who stops all": ("fit", {}, {"callbacks": [kinds.EarlyStopping("loss")]}),
        "what a dataset does not need": ("fit", {"x": batches, "y": None}, {"x": batches}),
        "verbose of evaluate": ("evaluate", {"verbose": 2}, {}),
        "verbose of predict": ("predict", {"verbose": 2}, {}),
    }


def compare(directory: Path) -> Any:
    """What is told of each case."""
    from gradring.errors import ConfigError, MismatchError, PeerLostError
    from gradring.tensorflow import CustomCollectiveStrategy

    strategy = CustomCollectiveStrategy()
    rank, model = strategy.communicator.rank, made(strategy)
    x, y = data()

    def run(case: Case, model: Any = model) -> Any:
        loop, *given = case
        options = {"x": x, "batch_size": BATCH, "verbose": 0}
        if loop != "predict":
            options["y"] = y
        options |= given[rank]
        if not hasattr(options["x"], "shape"):
            del options["y"]
        return getattr(model, loop)(**options)

    found: dict[str, Any] = {
        "equal": [name for name, case in equal(directory).items() if run(case) is not None]
    }
    for name, case in differing().items():
        with pytest.raises(MismatchError) as raised:
            run(case)
        found[name] = raised.value.rank, str(raised.value)
    # All ranks were told before any of them had begun, so their group is as before.
    run(("fit", {}, {}))
    texts = {"x": np.repeat(x[:, None], 3, axis=1)}
    run(("fit", texts, texts), made(strategy, batch=BATCH // 2))
    for loop in ("fit", "evaluate", "predict"):
        whole = made(strategy, batch=BATCH)
        with pytest.raises(ConfigError) as refused:
            run((loop, texts, texts), whole)
        found[f"whole batches, {loop}"] = str(refused.value)
        # The group has lost a step.
        strategy.communicator.close()
        strategy = CustomCollectiveStrategy()
    for name, loops in ALONE.items():
        strategy.communicator.close()
        strategy = CustomCollectiveStrategy()
        model = made(strategy)
        own = loops[rank]
        if own is None:
            strategy.communicator.close()
            continue
        with pytest.raises((MismatchError, PeerLostError)) as failed:
            run((own, {}, {}), model)
        found[name] = type(failed.value).__name__, str(failed.value)
    return found


#: What rank 0 calls, and what rank 1 does.
ALONE = {
    "evaluate alone": ("evaluate", None),
    "predict alone": ("predict", None),
    "fit alone": ("fit", None),
    "evaluate, and fit": ("evaluate", "fit"),
    "fit, and predict": ("fit", "predict"),
}


def made(strategy: Any, batch: int | None = None) -> Any:
    import keras

    with strategy.scope():
        inputs = keras.layers.Input((4,) if batch is None else (3, 4), batch_size=batch)
        # The state has a row for each sample of a batch.
        layers = [] if batch is None else [keras.layers.SimpleRNN(2, stateful=True)]
        model = keras.Sequential([inputs, *layers, keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=["mae"])
    return model


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_ranks(compare, 2, tmp_path_factory.mktemp("files"), timeout=400)


def test_arguments_that_differ_are_named_with_the_ranks_before_fit_begins(ranks: Any) -> None:
    assert len(ranks[0]) > 15
    for found in ranks:
        for name, said in found.items():
            if "|" not in name:
                continue
            rank, text = said
            argument, _, values = name.rpartition("=")
            other, first = values.split("|")
            assert rank == 1
            assert "rank 1 on " in text and f" has {argument}={other}, and rank 0 on " in text
            assert f" has {argument}={first}; give every rank the same arguments" in text
            assert len(text) < 300


def test_what_may_differ_trains(ranks: Any) -> None:
    for found in ranks:
        assert len(found["equal"]) == 12


@pytest.mark.parametrize("loop", ["fit", "evaluate", "predict"])
def test_a_model_that_takes_whole_batches_only_is_named(ranks: Any, loop: str) -> None:
    for rank, found in enumerate(ranks):
        text = found[f"whole batches, {loop}"]
        assert text.startswith(f"{loop} of the model 'sequential")
        assert f" failed on rank {rank} of " in text
        assert "has the static batch size 8" in text and "of 4 samples" in text


@pytest.mark.parametrize("case", ALONE)
def test_a_loop_of_one_rank_is_named(ranks: Any, case: str) -> None:
    calls = ALONE[case]
    for found, own in zip(ranks, calls, strict=True):
        if own is None:
            continue
        kind, text = found[case]
        assert kind == ("PeerLostError" if None in calls else "MismatchError")
        for loop in filter(None, calls):
            assert f"'{loop}: arguments'" in text
