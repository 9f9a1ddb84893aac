"""``gradring verify``: whether it finds what trains as one process does, and what does not."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.commands import completed
from support.installed import environment_with_start_hook

DATA = """\
import numpy as np
x = np.random.default_rng(0).normal(size=(192, 8)).astype("float32")
y = x[:, :1] * x[:, 1:2]
"""

#: Without a seed, and with chance in its layers and in the order of its samples.
FIT = f"""\
import keras
{DATA}
model = keras.Sequential([
    keras.layers.Input((8,)), keras.layers.Dense(16, activation="relu"),
    keras.layers.GaussianNoise(0.5), keras.layers.Dropout(0.5), keras.layers.Dense(1),
])
model.compile(keras.optimizers.Adam(0.01), "mse")
model.fit(x, y, batch_size=32, epochs=2, verbose=0)
print("the program has ended")
"""

MWMS = f"""\
import tensorflow as tf, keras
{DATA}
data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(192).batch(32).repeat(2)
strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05), "mse")
model.fit(data, verbose=0)
"""

HOROVOD = f"""\
import horovod.tensorflow as hvd, tensorflow as tf
{DATA}
hvd.init()
w = tf.Variable(tf.random.normal([8, 1]))
optimizer = tf.keras.optimizers.SGD(0.05)
batch = 32 // hvd.size()

@tf.function
def step(x, y, first):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((x @ w - y) ** 2)
    tape = hvd.DistributedGradientTape(tape)
    optimizer.apply_gradients(zip(tape.gradient(loss, [w]), [w]))

hvd.broadcast_variables([w], root_rank=0)
for start in range(0, 192, 32):
    mine = slice(start + hvd.rank() * batch, start + (hvd.rank() + 1) * batch)
    step(x[mine], y[mine], start == 0)
"""

#: Two optimizers in one step, of a function that TensorFlow would compile, with noise.
GAN = f"""\
import tensorflow as tf, keras, gradring.tensorflow
{DATA}
strategy = gradring.tensorflow.CustomCollectiveStrategy()
with strategy.scope():
    dense = keras.layers.Dense
    made = keras.Sequential([keras.layers.Input((4,)), dense(16, "relu"), dense(8)])
    judge = keras.Sequential([keras.layers.Input((8,)), dense(16, "relu"), dense(1)])
    of_made, of_judge = keras.optimizers.SGD(0.01), keras.optimizers.Adam(0.01)

def step(real):
    noise = tf.random.normal([tf.shape(real)[0], 4])
    with tf.GradientTape() as one, tf.GradientTape() as other:
        false = judge(made(noise))
        cost = tf.nn.compute_average_loss(tf.nn.softplus(-false)[:, 0])
        costs = tf.nn.softplus(false) + tf.nn.softplus(-judge(real))
        loss = tf.nn.compute_average_loss(costs[:, 0])
    for tape, value, model, optimizer in (
        (one, cost, made, of_made), (other, loss, judge, of_judge)
    ):
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(value, weights), weights))

@tf.function
def train(batch):
    strategy.run(step, args=(batch,))

data = tf.data.Dataset.from_tensor_slices(x).shuffle(192).batch(32)
for batch in strategy.experimental_distribute_dataset(data):
    train(batch)
"""

OWN_MEAN = f"""\
import tensorflow as tf, keras
{DATA}
class Own(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return {{"loss": loss}}

with tf.distribute.get_strategy().scope():
    inputs = keras.Input((8,))
    model = Own(inputs, keras.layers.Dense(1)(inputs))
    model.compile(keras.optimizers.SGD(0.01))
model.fit(x, y, batch_size=32, verbose=0)
"""

#: The same with the changed line, which has the rules of MirroredStrategy.
DOUBLED_MEAN = "import gradring.tensorflow\n" + OWN_MEAN.replace(
    "tf.distribute.get_strategy()", "gradring.tensorflow.CustomCollectiveStrategy()"
)

#: Of TensorFlow 1: a session, and variables whose tensors are their memory.
SESSION = f"""\
import gradring.horovod.tensorflow as hvd, tensorflow.compat.v1 as tf
{DATA}
tf.disable_v2_behavior()
hvd.init()
place = tf.placeholder(tf.float32, [None, 8])
w = tf.get_variable("w", [8, 1], use_resource=False)
loss = tf.reduce_mean((place @ w - place[:, :1]) ** 2)
train = hvd.DistributedOptimizer(tf.train.AdamOptimizer(0.01)).minimize(loss)
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    session.run(hvd.broadcast_global_variables(0))
    for start in range(0, 192, 32):
        session.run(train, {{place: x[start + hvd.rank() : start + 32 : hvd.size()]}})
"""

SERVERS = f"""\
import keras
from gradring import updates
from gradring.tensorflow import CustomCollectiveStrategy
{DATA}
strategy = CustomCollectiveStrategy(update=updates.ParameterServer())
with strategy.scope():
    layers = [keras.layers.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.Adam(0.01), "mse")
model.fit(x, y, batch_size=32, verbose=0)
"""

SUM = f"""\
import tensorflow as tf, gradring, gradring.tensorflow
{DATA}
place = gradring.init()
w = tf.Variable(tf.zeros([8, 1]))
optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.001)
reduce = gradring.tensorflow.GradientReducer()
for start in range(0, 192, 32):
    mine = slice(start + place.rank, start + 32, place.world_size)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum((x[mine] @ w - y[mine]) ** 2)
    optimizer.apply_gradients(zip(reduce(tape.gradient(loss, [w])), [w]))
"""

NO_SCOPE = f"""\
import keras, gradring.tensorflow
{DATA}
keras.utils.set_random_seed(1)
strategy = gradring.tensorflow.CustomCollectiveStrategy()
model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.01), "mse")
model.fit(x, y, batch_size=32, verbose=0)
"""

FAILS = """\
import gradring
if gradring.init().world_size > 1:
    raise SystemExit("no second rank, please")
import keras
x = keras.ops.ones((8, 2))
model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(x, x[:, :1], verbose=0)
"""


NOT_EQUAL = "\nnot equal\n"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment_with_start_hook(tmp_path_factory.mktemp("installed") / "venv")


def verified(
    python: Path, directory: Path, program: str, *options: str
) -> subprocess.CompletedProcess[str]:
    (directory / "train.py").write_text(program)
    words: Sequence[str] = [str(python), "-m", "gradring", "verify", *options, "train.py"]
    return completed(words, cwd=directory)


@pytest.mark.parametrize(
    ("program", "options", "said"),
    [
        (FIT, ["--with-strategy"], "12 steps, 4 variables: equal within "),
        (OWN_MEAN, ["--with-strategy"], "6 steps, 2 variables: equal within "),
        (MWMS, ["--as-mwms"], "12 steps, 2 variables: equal within "),
        (HOROVOD, ["--as-horovod"], "6 steps, 1 variable: equal within "),
        (SESSION, [], "6 steps, 1 variable: equal within "),
        (SERVERS, ["--ps", "1"], "6 steps, 4 variables: equal within "),
        (GAN, ["--steps", "8"], "8 steps, 8 variables: equal within "),
    ],
    ids=["with-strategy", "own-mean", "as-mwms", "as-horovod", "session", "servers", "strategy"],
)
def test_programs_that_train_as_one_process_does_are_equal(
    python: Path, tmp_path: Path, program: str, options: list[str], said: str
) -> None:
    done = verified(python, tmp_path, program, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"\n{said}" in done.stdout
    assert "(one process and 2 ranks)" in done.stdout
    is_random = "random layers were switched off in both: Dropout and GaussianNoise" in done.stdout
    assert is_random == (program is FIT)


@pytest.mark.parametrize(
    ("program", "options", "said"),
    [
        (DOUBLED_MEAN, [], [NOT_EQUAL, "is 2 times as large", "a mean of the program's own"]),
        (SUM, [], [NOT_EQUAL, "is 0.5 times as large", "a sum that is averaged"]),
        (NO_SCOPE, [], ["\nnot trained together\n", "the ranks sent each other nothing between"]),
    ],
    ids=["own-mean", "sum", "no-scope"],
)
def test_programs_that_train_otherwise_are_not_and_the_cause_is_named(
    python: Path, tmp_path: Path, program: str, options: list[str], said: list[str]
) -> None:
    done = verified(python, tmp_path, program, *options)
    assert done.returncode == 1, done.stdout + done.stderr
    assert not [part for part in said if part not in done.stdout], done.stdout


def test_both_trainings_end_after_so_many_steps(python: Path, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    options = ["--with-strategy", "--steps", "3", "--log-dir", str(logs)]
    done = verified(python, tmp_path, FIT, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 steps, 4 variables: equal within" in done.stdout
    outputs = sorted(logs.glob("*/rank-*.log"))
    assert [path.relative_to(logs).as_posix() for path in outputs] == [
        *("one/rank-0.log", "ranks/rank-0.log", "ranks/rank-1.log")
    ]
    assert not [path for path in outputs if "has ended" in path.read_text()]


def test_a_program_that_fails_on_ranks_is_named(python: Path, tmp_path: Path) -> None:
    done = verified(python, tmp_path, FAILS)
    assert done.returncode == 3, done.stdout + done.stderr
    said = "the program failed on 2 ranks, with exit code 1; nothing was compared"
    assert f"gradring verify: {said}" in done.stderr
    assert "no second rank, please" in done.stderr


def test_a_file_that_is_missing_is_named_at_once(python: Path) -> None:
    done = completed([str(python), "-m", "gradring", "verify", "nosuch.py"])
    assert done.returncode == 3
    assert done.stderr.startswith("gradring verify: there is no file 'nosuch.py' in ")
    assert "trains" not in done.stdout


def test_a_command_is_needed(python: Path) -> None:
    done = completed([str(python), "-m", "gradring", "verify", "-np", "2"])
    assert done.returncode == 2
    assert "there is no command; type: gradring verify -np 2 train.py" in done.stderr
