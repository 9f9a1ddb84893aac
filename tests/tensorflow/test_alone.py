"""Models that each rank trains by itself, though it has a group."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

START = """\
import keras, numpy as np, tensorflow as tf
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
def made():
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model
"""
PROGRAMS = {
    "outside of the scope": """
import gradring.tensorflow
strategy = gradring.tensorflow.CustomCollectiveStrategy()
made().fit(x, x[:, :1], verbose=0)
""",
    "a strict strategy": """
import gradring.tensorflow
strategy = gradring.tensorflow.CustomCollectiveStrategy(strict=True)
made().fit(x, x[:, :1], verbose=0)
""",
    "init and a plain fit": """
import gradring
comm = gradring.init()
made().fit(x, x[:, :1], verbose=0)
""",
    "a loop": """
import gradring
comm = gradring.init()
model = made()
@tf.function
def step():
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x)))
    weights = model.trainable_variables
    model.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
step(), step()
""",
    "a reducer": """
import gradring.tensorflow
comm = gradring.init()
model, reduced = made(), gradring.tensorflow.GradientReducer()
weights = model.trainable_variables
with tf.GradientTape() as tape:
    loss = tf.reduce_mean(tf.square(model(x)))
model.optimizer.apply_gradients(zip(reduced(tape.gradient(loss, weights)), weights))
""",
    "half of the gradients": """
import gradring.tensorflow
comm = gradring.init()
model, reduced = made(), gradring.tensorflow.GradientReducer()
weights = model.trainable_variables
@tf.function
def step():
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x)))
    first, second = tape.gradient(loss, weights)
    model.optimizer.apply_gradients(zip([first, *reduced([second], weights[1:])], weights))
step(), step()
""",
    "no gradient": """
import gradring.tensorflow
comm = gradring.init()
model, reduced = made(), gradring.tensorflow.GradientReducer()
weights = model.trainable_variables
gradients = reduced([tf.ones_like(weights[0]), None], weights)
model.optimizer.apply_gradients(zip(gradients, weights))
""",
    "variables of each rank": """
import gradring.horovod.tensorflow as hvd
hvd.init()
model = made()
weights = model.trainable_variables
with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
    loss = tf.reduce_mean(tf.square(model(x)))
tape.register_local_source(weights[0])
model.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
""",
    "a TensorFlow that gradring does not know": """
import sys
sys.modules["gradring.tensorflow"] = None
import gradring
comm = gradring.init()
made().fit(x, x[:, :1], verbose=0)
""",
    "inside of the scope": """
import gradring.tensorflow
with gradring.tensorflow.CustomCollectiveStrategy(strict=True).scope():
    model = made()
model.fit(x, x[:, :1], verbose=0)
""",
}
ALL = "2 variables (sequential/dense/kernel, ...) alone: no gradient that SGD applies was reduced"
HALF = (
    "1 variable (sequential/dense/kernel) of 2 alone: SGD applies gradients of them that were not"
)
NAMED = {
    "outside of the scope": ALL,
    "a strict strategy": ALL,
    "init and a plain fit": ALL,
    "a loop": ALL,
    "half of the gradients": HALF,
}


@pytest.mark.parametrize("kind", PROGRAMS)
def test_who_trains_alone_is_told(tmp_path: Path, kind: str) -> None:
    program = tmp_path / "train.py"
    # In `init and a plain fit`, Keras comes after the group.
    parts = [PROGRAMS[kind], START]
    first = START + PROGRAMS[kind]
    late = "import gradring\ncomm = gradring.init()\n" + "".join(reversed(parts)).replace(
        "import gradring\ncomm = gradring.init()\n", ""
    )
    program.write_text(late if kind == "init and a plain fit" else first)
    done = subprocess.run(
        [sys.executable, "-m", "gradring", "run", "-np", "2", program],
        capture_output=True,
        text=True,
        timeout=240,
    )
    lines = [line for line in done.stderr.splitlines() if "each of 2 ranks trains" in line]
    assert all(NAMED.get(kind, "nothing") in line for line in lines), done.stderr
    if kind == "a strict strategy":
        assert done.returncode != 0
        assert any("gradring.errors.ConfigError: rank" in line for line in lines), done.stderr
        return
    assert done.returncode == 0, done.stderr
    if kind in NAMED:
        (line,) = lines
        assert line.startswith("[0] gradring: each of 2 ranks trains ")
        assert ("with strategy.scope()" in line) == (NAMED[kind] == ALL)
    else:
        assert not lines
