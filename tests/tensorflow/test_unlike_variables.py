"""Variables that each rank assigns by itself are named, if they differ."""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradring.testing import run_ranks
from support.keras_models import needs_fit
from support.log_lines import kept_lines
from support.tf_worker import join

#: By layer, or what was done before `fit`: what the ranks are told to have unlike. In the first of
#: them the ranks' parts give it other values, and nothing makes them equal.
KINDS = {"none": "variables", "mean": "", "of weights": "", "dropout": "", "adapted": "weights"}


def fit_each() -> tuple[str, dict[str, tuple[list[str], list[Any]]]]:
    """What the log says of a model with each layer, and what its variables are afterwards."""
    import tensorflow as tf

    from gradring.tensorflow import CustomCollectiveStrategy

    keras = tf.keras

    class Range(keras.layers.Layer):  # type: ignore[misc, name-defined]
        """Keeps the largest input, as quantizers do."""

        def __init__(self, kind: str) -> None:
            super().__init__()
            self.kind = kind

        def build(self, shape: Any) -> None:
            is_new = keras.__name__.startswith("keras")
            mean = "mean" if is_new else tf.VariableAggregation.MEAN
            options = {"aggregation": mean} if self.kind == "mean" else {}
            self.most = self.add_weight(
                name="most", shape=(), initializer="zeros", trainable=False, **options
            )
            self.scale = self.add_weight(name="scale", shape=(), initializer="ones")
            self.steps = self.add_weight(
                name="steps", shape=(), initializer="zeros", trainable=False, dtype="int64"
            )

        def call(self, x: Any, training: bool = False) -> Any:
            if training:
                seen = self.scale if self.kind == "of weights" else tf.reduce_max(x)
                self.most.assign(tf.convert_to_tensor(seen))
                self.steps.assign(tf.cast(seen * 1000, tf.int64))
            return x * self.scale

    of_keras = {
        "dropout": lambda: keras.layers.Dropout(0.5),
        "adapted": lambda: keras.layers.Normalization(),
    }
    records = kept_lines(logging.WARNING)
    results = {}
    with join() as comm:
        strategy = CustomCollectiveStrategy(communicator=comm)
        x = np.arange(32, dtype=np.float32).reshape(16, 2) / 32
        for kind in KINDS:
            with strategy.scope():
                layer = of_keras[kind]() if kind in of_keras else Range(kind)
                model = keras.Sequential(
                    [keras.layers.Input((2,)), layer, keras.layers.Dense(1)], name="m"
                )
                model.compile("sgd", "mse")
            if kind == "adapted":
                layer.adapt(x[comm.rank :])
            for _ in range(2):
                # The last batch has one sample: one rank has none.
                model.fit(x[:13], x[:13, :1], batch_size=4, epochs=2, shuffle=False, verbose=0)
            values = [np.array(weight).tolist() for weight in model.get_weights()]
            # Once for a process, where a version is newer than the tried ones.
            said = [line for line in records if "is newer than the versions" not in line]
            results[kind] = (said, values)
            records.clear()
    return keras.__name__, results


def check(env: dict[str, str]) -> str:
    (name, first), (_, second) = run_ranks(fit_each, 2, env=env)
    for kind, unlike in KINDS.items():
        said, values = first[kind]
        assert (values != second[kind][1]) or not unlike, kind
        assert second[kind][0] == [], kind
        told = f"after epoch 0 of fit, {unlike} of the model 'm' differ between the ranks"
        assert said[0].startswith(told) if unlike else not said, (kind, said)
    # In each `fit` it is assigned anew.
    assert len(first["none"][0]) == 2
    line = first["none"][0][0]
    assert "(1)" in line and "/most" in line and "scale" not in line and "steps" not in line, line
    # The weights are compared in the model's first epoch, and in the last one of each `fit`.
    line, again = first["adapted"][0]
    assert again.startswith("after epoch 1 of fit, weights of the model 'm' differ"), again
    assert "(2)" in line and "mean" in line and "variance" in line and "load_weights" in line, line
    return str(name)


@needs_fit
def test_unlike_variables_are_named() -> None:
    assert check({}).startswith("keras")


@pytest.mark.skipif(importlib.util.find_spec("tf_keras") is None, reason="needs tf_keras")
def test_unlike_variables_of_tf_keras_are_named() -> None:
    assert check({"TF_USE_LEGACY_KERAS": "1"}).startswith("tf_keras")


ON_BATCH = """\
import contextlib, keras, numpy as np, os, sys, tensorflow as tf
from gradring.tensorflow import CustomCollectiveStrategy
what, scope = sys.argv[1], contextlib.nullcontext()
if sys.argv[2] == "scope":
    scope = CustomCollectiveStrategy().scope()
class Seen(keras.layers.Layer):
    def build(self, shape):
        self.seen = self.add_weight(name="seen", shape=(), initializer="zeros", trainable=False)
    def call(self, x):
        self.seen.assign(tf.reduce_max(x) if what == "assigned" else 1.0)
        return x
with scope:
    model = keras.Sequential([keras.Input((2,)), Seen(), keras.layers.Dense(1)], name="m")
    model.compile("sgd", "mse")
    bias = model.layers[-1].bias
for step in range(5):
    x = np.random.normal(size=(6, 2))
    if what == "drawn" and step == 3:
        x = tf.random.normal((6, 2))
    if sys.argv[2] == "scope":
        x = x + int(os.environ["GRADRING_RANK"])
    model.train_on_batch(x, np.ones((6, 1)))
    if what == "set" and step == 1:
        bias.assign([float(os.environ["GRADRING_RANK"])])
"""


@needs_fit
@pytest.mark.parametrize(
    ("what", "way", "told"),
    [
        ("nothing", "given", ""),
        ("assigned", "given", "after batch 1 of train_on_batch, variables of the model 'm' differ"),
        ("set", "given", "after batch 4 of train_on_batch, weights of the model 'm' differ"),
        ("drawn", "given", "batch 4 of train_on_batch of the model 'm' differs"),
        ("nothing", "scope", ""),
        ("assigned", "scope", "after batch 1 of train_on_batch, variables of the model 'm' differ"),
        ("set", "scope", "after batch 4 of train_on_batch, weights of the model 'm' differ"),
    ],
)
def test_train_on_batch_compares_at_some_batches(
    tmp_path: Path, what: str, way: str, told: str
) -> None:
    program = tmp_path / "train.py"
    program.write_text(ON_BATCH)
    options = ["--with-strategy"] if way == "given" else []
    done = subprocess.run(
        [sys.executable, "-m", "gradring", "run", *options, "-np", "2", program, what, way],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "train_on_batch" in line]
    assert len(lines) == bool(told), lines
    assert all(line.startswith(f"[0] gradring: {told}") for line in lines), lines
