"""Programs of Keras 3 that know of no replicas train as one process does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from support.chosen import marked

PROGRAMS = Path(__file__).with_name("given_programs.py")


def ran(directory: Path, *launcher: str) -> subprocess.CompletedProcess[str]:
    directory.mkdir()
    return subprocess.run(
        [*launcher, sys.executable, PROGRAMS, directory],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=800,
    )


def run_together(
    directory: Path, text: str, *arguments: str, ranks: int = 2, options: Any = ("--with-strategy",)
) -> subprocess.CompletedProcess[str]:
    """Runs a program as `train.py` in the directory, with options of the launcher."""
    program = directory / "train.py"
    program.write_text(text)
    run = ["-m", "gradring", "run", *options, "-np", str(ranks)]
    return subprocess.run(
        [sys.executable, *run, program, *arguments], capture_output=True, text=True, timeout=240
    )


def assert_named_once(
    done: subprocess.CompletedProcess[str], warning: str, names: Sequence[str]
) -> None:
    """Asserts that rank 0 alone has written one line of the warning for each name."""
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if warning in line]
    assert all(line.startswith("[0] ") for line in lines)
    assert len(lines) == len(names), lines
    for name in names:
        assert sum(name in line for line in lines) == 1, lines


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    done = ran(tmp_path_factory.mktemp("alone") / "files")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", marked([2, 3], [2]))
def test_programs_that_know_of_no_replicas_train_as_in_one_process(
    alone: dict[str, Any], tmp_path: Path, ranks: int
) -> None:
    launcher = [sys.executable, "-m", "gradring", "run", "--with-strategy", "-np", str(ranks), "--"]
    done = ran(tmp_path / "files", *launcher)
    assert done.returncode == 0, done.stderr
    lines = [line.partition("] ")[2] for line in done.stdout.splitlines()]
    found = [json.loads(line) for line in lines if line.startswith("{")]
    assert len(found) == ranks
    for name, expected in alone.items():
        for together in found:
            numbers = flat(together[name])
            assert numbers == pytest.approx(flat(expected), rel=2e-5, abs=2e-6), name
    warnings = [line for line in done.stderr.splitlines() if "(GRADRING_WITH_STRATEGY)" in line]
    expected = (
        "each batch is divided",
        "outside of Keras' fit",  # a loop of the program's own
        "neither a mean nor a sum",  # the gradient of a gradient, in `gradients_of_gradients`
        "an eager step does not show",
    )
    assert len(warnings) == len(expected), warnings
    for words in expected:
        (line,) = (line for line in warnings if words in line)
        assert line.startswith("[0] ")


WARNED = """\
import keras, numpy as np, tensorflow as tf
x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
def mixed(y, p):
    total = tf.reduce_sum(tf.square(y - p))
    return tf.exp(-total - tf.reduce_sum(tf.square(model.trainable_weights[0])))
def masked(y, p):
    kept = tf.cast(y > 0, tf.float32)
    return tf.reduce_sum(kept * tf.square(y - p) / tf.reduce_sum(kept))
class Model(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.kind(y, self(x))
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return {"own": loss}
def root(y, p):
    return tf.sqrt(tf.reduce_mean(tf.square(y - p)))
for kind in (mixed, masked, root):
    inputs = keras.Input((4,))
    model = Model(inputs, keras.layers.Dense(1)(inputs))
    model.kind = kind
    model.compile("sgd", jit_compile=True)
    model.fit(x, x[:, :1], batch_size=16, verbose=0)
class Similar(Model):
    def kind(self, y, p):
        similar = tf.matmul(p, p, transpose_b=True)
        return self.compute_loss(y=tf.range(tf.shape(p)[0]), y_pred=similar)
inputs = keras.Input((4,))
model = Similar(inputs, keras.layers.Dense(3)(inputs))
model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(x, x[:, :1], batch_size=16, verbose=0)
def by_number(y, p):
    return tf.reduce_sum(tf.square(y - p)) / y.shape[0]
model = Model(inputs, keras.layers.Dense(1)(inputs))
model.kind = by_number
model.compile("sgd")
data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(16, drop_remainder=True)
model.fit(data, verbose=0)
class Range(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.seen = tf.Variable(0.0, trainable=False, name="seen")
    def call(self, x):
        self.seen.assign(tf.maximum(self.seen, tf.reduce_max(x)))
        return x / tf.maximum(self.seen, 1.0)
model = keras.Sequential([keras.Input((4,)), Range(), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(x, x[:, :1], batch_size=16, verbose=0)
class Linear(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner = keras.layers.Dense(1)
    def call(self, x):
        return self.inner(x)
model = Linear()
model.compile("sgd", "mse", run_eagerly=True)
model.fit(((tf.sparse.from_dense(x), x[:, :1]) for _ in range(3)), verbose=0)
model = Model(inputs, keras.layers.Dense(1)(inputs))
model.kind = lambda y, p: tf.reduce_sum(tf.square(y - p))
model.compile("sgd", run_eagerly=True)
model.fit(x, x[:, :1], batch_size=16, verbose=0)
"""


METRICS = """\
import keras, numpy as np, tensorflow as tf
ops, X = keras.ops, np.random.default_rng(0).normal(size=(40, 4)).astype("float32")
def told(metric):
    metric.__name__ = metric.__name__ + "_told"
    return metric
@told
def f1(t, p):
    precision, recall = ops.sum(t * p) / ops.sum(p), ops.sum(t * p) / ops.sum(t)
    return 2 * precision * recall / (precision + recall)
@told
def root(t, p):
    return ops.sqrt(ops.mean(ops.square(t - p)))
@told
def largest(t, p):
    return ops.max(ops.abs(t - p))
@told
def of_pairs(t, p):
    similar = ops.matmul(p, ops.transpose(p))
    return ops.equal(ops.argmax(similar, -1), ops.arange(ops.shape(p)[0]))
def mean(t, p):
    return ops.mean(ops.abs(t - p))
def rows(t, p):
    return ops.max(ops.abs(t - p), -1)
def right(t, p):
    return tf.reduce_mean(tf.cast(tf.equal(t > 0.5, p > 0.5), tf.float32))
def dice(t, p):
    both = ops.sum(t * p, 1)
    return ops.mean((2 * both + 1) / (ops.sum(t, 1) + ops.sum(p, 1) + 1))
inputs = keras.Input((4,))
model = keras.Model(inputs, keras.layers.Dense(2, activation="sigmoid")(inputs))
functions = [f1, root, largest, of_pairs, mean, rows, right, dice]
model.compile("sgd", "mse", metrics=[*functions, "accuracy", "mae", keras.metrics.AUC()])
model.fit(X, (X[:, :2] > 0).astype("float32"), batch_size=12, verbose=0)
"""


def test_metrics_whose_parts_do_not_give_them_are_named(tmp_path: Path) -> None:
    done = run_together(tmp_path, METRICS)
    names = "'f1_told'", "'root_told'", "'largest_told'", "'of_pairs_told'"
    assert_named_once(done, "a value of the metric", names)


NUMBERS = """\
import keras, numpy as np, tensorflow as tf
ops, X = keras.ops, np.random.default_rng(0).normal(size=(40, 4)).astype("float32")
class Added(keras.metrics.Metric):
    def __init__(self, name, total, count=None):
        super().__init__(name=name)
        self.of_total, self.of_count = total, count
        self.total = self.add_variable((), "zeros", name="total")
        if count is not None:
            self.count = self.add_variable((), "zeros", name="count")
    def update_state(self, y, p, sample_weight=None):
        errors = ops.square(y - p)
        self.total.assign_add(self.of_total(errors))
        if self.of_count is not None:
            self.count.assign_add(self.of_count(errors))
    def result(self):
        return self.total / self.count if self.of_count is not None else self.total
def one(errors):
    return 1
def rows(errors):
    return ops.cast(ops.shape(errors)[0], "float32")
named = [Added("batches", one), Added("sum_of_means", ops.mean), Added("by_batches", ops.sum, one)]
right = [Added("sums", ops.sum, rows), Added("means", ops.mean, one), Added("all_rows", rows)]
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse", metrics=[*named, *right, "mae", keras.metrics.AUC(), "accuracy"])
Y = (X[:, :1] > 0).astype("float32")
model.fit(X, Y, batch_size=8, verbose=0)
data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8, drop_remainder=True)
model.fit(data, verbose=0)
"""


def test_metrics_that_count_batches_are_named(tmp_path: Path) -> None:
    done = run_together(tmp_path, NUMBERS)
    names = "'batches'", "'sum_of_means'", "'by_batches'"
    assert_named_once(done, "adds a number for each batch", names)


PAIRS = """\
import keras, numpy as np
ops, X = keras.ops, np.random.default_rng(0).normal(size=(40, 4)).astype("float32")
class Matches(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="matches")
        self.count = self.add_variable((), "zeros", name="count")
    def update_state(self, y, p, sample_weight=None):
        found = ops.reshape(ops.argmax(p, axis=1), (-1, 1))
        same = ops.equal(ops.cast(y, "int32"), ops.cast(found, "int32"))  # (n,) and (n, 1)
        self.count.assign_add(ops.sum(ops.cast(same, "float32")))
    def result(self):
        return self.count
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile("sgd", loss, metrics=[Matches()])
model.fit(X, np.arange(40) % 3, batch_size=8, verbose=0)
"""


def test_a_metric_that_compares_samples_with_each_other_is_named(tmp_path: Path) -> None:
    done = run_together(tmp_path, PAIRS)
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stderr.splitlines() if "metric 'matches'" in line)
    assert line.startswith("[0] ") and "compares each sample of a batch with each other" in line


CONSTANT = """import keras, numpy as np, tensorflow as tf
class Model(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            both = tf.concat([self(x), tf.ones((8, 1))], 0)
            loss = keras.losses.mean_squared_error(tf.zeros((16, 1)), both)
        return {"loss": tf.reduce_mean(loss)}
inputs = keras.Input((4,))
model = Model(inputs, keras.layers.Dense(1)(inputs))
model.compile("sgd")
model.fit(np.ones([32, 4]), np.ones([32, 1]), batch_size=8, verbose=0)
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have notes since Python 3.11")
def test_an_error_of_shapes_says_that_batches_are_divided(tmp_path: Path) -> None:
    done = run_together(tmp_path, CONSTANT)
    assert done.returncode != 0
    assert "gradring divides each batch among 2 replicas" in done.stderr, done.stderr
    assert "train by train_on_batch, which leaves such a batch whole" in done.stderr


COUNTED = """\
import keras, numpy as np
class Largest(keras.metrics.Metric):
    def __init__(self, **kwargs):
        super().__init__(name="largest_of_all")
        self.top = self.add_variable((), "zeros", name="top", **kwargs)
    def update_state(self, y, p, sample_weight=None):
        self.top.assign(keras.ops.maximum(self.top, keras.ops.max(p)))
    def result(self):
        return self.top
class Running(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="running_mean")
        self.n, self.m = (self.add_variable((), "zeros", name=name) for name in "nm")
    def update_state(self, y, p, sample_weight=None):
        rows = keras.ops.cast(keras.ops.shape(y)[0], "float32")
        self.n.assign_add(rows)
        self.m.assign_add((keras.ops.mean(p) - self.m) * rows / self.n)
    def result(self):
        return self.m
class Harmonic(keras.Model):
    def train_step(self, data):
        logs = super().train_step(data)
        p, r = self.parts.metrics[0].result(), self.parts.metrics[1].result()
        mixed = logs["loss"] + keras.ops.mean(data[0])
        return {**logs, "harmonic": 2 * p * r / (p + r), "half": logs["loss"] / 2, "mixed": mixed}
    @property
    def parts(self):
        return self.metrics[1]
every = [
    *("AUC", "BinaryAccuracy", "BinaryCrossentropy", "BinaryIoU", "CosineSimilarity", "F1Score"),
    *("FalseNegatives", "Hinge", "KLDivergence", "LogCoshError", "MeanAbsoluteError", "Poisson"),
    *("MeanSquaredError", "Precision", "R2Score", "Recall", "RootMeanSquaredError"),
]
metrics = [getattr(keras.metrics, name)() for name in every]
metrics += [
    keras.metrics.OneHotMeanIoU(2),
    keras.metrics.PrecisionAtRecall(0.5),
    keras.metrics.SensitivityAtSpecificity(0.5),
    keras.metrics.AUC(multi_label=True, name="of_labels"),
]
PLACE
x = np.random.default_rng(0).normal(size=(40, 4)).astype("float32")
inputs = keras.Input((4,))
with scope():
    model = Harmonic(inputs, keras.layers.Dense(2, activation="sigmoid")(inputs))
    chosen = [keras.metrics.Precision(), keras.metrics.Recall()] + [Largest(), Running()] + metrics
    model.compile("sgd", "mse", metrics=chosen, weighted_metrics=["accuracy"])
model.fit(x, (x[:, :2] > 0).astype("float32"), batch_size=12, verbose=0)
"""


@pytest.mark.parametrize("place", ["given", "scope"])
def test_metrics_that_are_no_sums_are_named(tmp_path: Path, place: str) -> None:
    scope = "from contextlib import nullcontext as scope"
    if place == "scope":
        scope = "import gradring.tensorflow as g; scope = g.CustomCollectiveStrategy().scope"
    options = ["--with-strategy"] if place == "given" else []
    done = run_together(tmp_path, COUNTED.replace("PLACE", scope), options=options)
    names = "'largest_of_all'", "'running_mean'", "the log 'mixed'"
    assert_named_once(done, "that of one process", names)


GLOBAL = """\
import keras, numpy as np, tensorflow as tf
average, steps = tf.Variable(0.0, name="average"), tf.Variable(0.0, name="steps")
total = tf.Variable(tf.zeros((4, 1)), name="total")
class Counting(keras.Model):
    def build(self, shape):
        self.kept = tf.Variable(0.0, name="kept")
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        average.assign(0.9 * average + 0.1 * loss)
        self.kept.assign_add(loss * 0)
        steps.assign_add(1.0)
        total.assign_add(gradients[0])
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"loss": loss}
x = np.random.default_rng(0).normal(size=(42, 4)).astype("float32")
inputs = keras.Input((4,))
model = Counting(inputs, keras.layers.Dense(1)(inputs))
model.compile(keras.optimizers.AdamW(0.1))
model.fit(x, x[:, :1], batch_size=12, epochs=2, verbose=0)
"""


def test_variables_of_no_model_that_a_step_assigns_are_named(tmp_path: Path) -> None:
    done = run_together(tmp_path, GLOBAL)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "belongs to no model" in line]
    assert len(lines) == 1 and lines[0].startswith("[0] "), lines
    assert "'average'" in lines[0]


MERGED = """\
import keras, numpy as np, sys, tensorflow as tf
class Graphs(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = keras.layers.Dense(4), keras.layers.Dense(1)
    def call(self, graphs):
        nodes, numbers = graphs
        return self.outer(tf.math.segment_mean(self.inner(nodes), numbers))
def batches(sizes=(1, 2, 3, 2)):
    for seed in range(4):
        numbers = np.repeat(np.arange(4), sizes).astype("int32")
        x = np.random.default_rng(seed).normal(size=(12, 3)).astype("float32")
        yield (x[: len(numbers)], numbers), x[:4, :1]
keras.utils.set_random_seed(1)
model = Graphs()
model.compile("sgd", "mse")
if sys.argv[1] == "whole":
    for batch in batches():
        model.train_on_batch(*batch)
    print(model.get_weights()[0].tolist())
else:
    sizes = [8, None][sys.argv[1] == "unknown"], [4, None][sys.argv[1] == "unknown"]
    nodes, graphs = tf.TensorSpec((sizes[0], 3)), tf.TensorSpec((sizes[1], 1))
    spec = (nodes, tf.TensorSpec((sizes[0],), tf.int32)), graphs
    model.fit(tf.data.Dataset.from_generator(batches, output_signature=spec), verbose=0)
"""


@pytest.mark.parametrize("sizes", ["known", "unknown"])
def test_a_batch_whose_rows_are_no_samples_is_not_divided(tmp_path: Path, sizes: str) -> None:
    done = run_together(tmp_path, MERGED, sizes)
    assert done.returncode != 0
    assert "ConfigError: " in done.stderr, done.stderr
    assert "tensors of a part of a batch have different numbers of rows" in done.stderr
    assert "train by train_on_batch, which leaves such a batch whole" in done.stderr


def test_each_rank_trains_the_whole_of_a_batch_whose_rows_are_no_samples(tmp_path: Path) -> None:
    together = run_together(tmp_path, MERGED, "whole")
    command = [sys.executable, str(tmp_path / "train.py"), "whole"]
    alone = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    expected = flat(json.loads(alone.stdout))
    found = [line.partition("] ")[2] for line in together.stdout.splitlines()]
    assert len(found) == 2, together.stderr
    for line in found:
        assert flat(json.loads(line)) == pytest.approx(expected, rel=1e-6)


def test_a_single_rank_trains_batches_whose_rows_are_no_samples(tmp_path: Path) -> None:
    done = run_together(tmp_path, MERGED, "unknown", ranks=1)
    assert done.returncode == 0, done.stderr


def test_a_loss_that_differs_is_named(tmp_path: Path) -> None:
    done = run_together(tmp_path, WARNED)
    assert done.returncode == 0, done.stderr
    for words in (
        "adds a sum over samples to what is no sum",
        "divided by a sum over data, such as a mask",
        "neither a mean nor a sum over samples",
        "no linear function of a mean over samples",
        "divided by a number that equals the samples of a rank",
        "jit_compile=True is left out",
        "eager step it is unknown whether one process would add up",
        "an eager step does not show whether a loss is a mean or a sum over samples",
        "variables of the model 'sequential' differ between the ranks (1): seen",
    ):
        (line,) = (line for line in done.stderr.splitlines() if words in line)
        assert line.startswith("[0] ")


def flat(value: Any) -> list[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        return [] if value is None else [value]
    return [number for part in value for number in flat(part)]
