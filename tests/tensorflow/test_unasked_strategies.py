"""Programs that make TensorFlow's own strategy, or none, are trained by gradring all the same."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gradring.machine.ports import free_ports
from support.installed import environment_with_start_hook

#: Makes the strategy by each of its names, and asks what programs ask of it.
MWMS = """\
import json, sys
assert not {"gradring", "numpy", "tensorflow"} & set(sys.modules)
import tensorflow as tf

tf.config.threading.set_inter_op_parallelism_threads(1)
# Before the strategy, as in most programs, and with other seeds on each rank.
x = tf.random.stateless_uniform([64, 3], [1, 2])
data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).shuffle(64).batch(16)

from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceStrategy
Mwms = tf.distribute.MultiWorkerMirroredStrategy
Old = tf.distribute.experimental.MultiWorkerMirroredStrategy
assert Mwms is CollectiveAllReduceStrategy
Options = tf.distribute.experimental.CommunicationOptions
Hint = tf.distribute.experimental.CommunicationImplementation
options = Options(bytes_per_pack=4096, timeout_seconds=30.0, implementation=Hint.RING)
resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
made = [
    Mwms(communication_options=options),
    Mwms(resolver),
    Old(),
    Old(Hint.RING, resolver),
    Old(communication=Hint.AUTO, cluster_resolver=resolver),
]

from gradring.tensorflow import CustomCollectiveStrategy
for strategy in made:
    assert isinstance(strategy, CustomCollectiveStrategy)
    assert isinstance(strategy, Mwms) and isinstance(strategy, Old)
    assert strategy.communicator is made[0].communicator
    assert strategy.cluster_resolver.task_type == "worker"
assert made[0].extended._bucket_bytes == 4096 and made[2].extended._bucket_bytes > 4096
assert type(CustomCollectiveStrategy()) is CustomCollectiveStrategy
try:
    Mwms(nonsense=1)
except TypeError as error:
    assert "MultiWorkerMirroredStrategy.__init__() got an unexpected" in str(error), error

import keras
with made[1].scope():
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
history = model.fit(data, epochs=2, verbose=0).history["loss"]
class Own(Mwms):
    def __init__(self): pass
Own()
print(json.dumps([made[0].num_replicas_in_sync, history, model.get_weights()[0].tolist()]))
"""

#: A script for one machine: nothing in it knows of ranks.
SINGLE = """\
import json, os, sys
import keras
import numpy as np
import tensorflow as tf

tf.config.threading.set_inter_op_parallelism_threads(1)
keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(640, 8)).astype("float32")
y = x[:, :1] - 2 * x[:, 1:2]
data = tf.data.Dataset.from_tensor_slices((x, y))

model = keras.Sequential([
    keras.layers.Input((8,)), keras.layers.Dense(16, "tanh"), keras.layers.Dense(1),
])
model.compile(keras.optimizers.Adam(1e-2), "mse", metrics=["mae"])
best = os.path.join(sys.argv[1], "best.keras")
callbacks = [
    keras.callbacks.ModelCheckpoint(best, save_best_only=True),
    keras.callbacks.EarlyStopping(patience=50, restore_best_weights=True),
    keras.callbacks.ReduceLROnPlateau(patience=1),
]
told = {"tensors": model.fit(
    x, y, batch_size=64, epochs=3, shuffle=False, validation_split=0.2, callbacks=callbacks,
    verbose=0,
).history}
told["dataset"] = model.fit(data.batch(64), epochs=1, verbose=0).history
told["evaluate"] = model.evaluate(x, y, verbose=0)
told["predict"] = model.predict(x, verbose=0).ravel().tolist()[::80]
model.save(os.path.join(sys.argv[1], "model.keras"))
loaded = keras.models.load_model(os.path.join(sys.argv[1], "model.keras"))
told["loaded"] = loaded.evaluate(x, y, verbose=0)
told["best"] = keras.models.load_model(best).evaluate(x, y, verbose=0)

keras.utils.clear_session()

class Subclass(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
    def call(self, x):
        return self.dense(x)

again = Subclass()
again.compile("sgd", "mse")
told["batch"] = float(again.train_on_batch(x[:64], y[:64]))
told["weights"] = [weight.tolist() for weight in [*model.get_weights(), *again.get_weights()]]
shuffled = again.fit(data.shuffle(640).batch(64), epochs=1, verbose=0).history
print(json.dumps([told, shuffled]))
"""
#: Models that differ in who takes the mean; each has an optimizer of another name.
OWN_STEPS = """\
import json
import numpy as np
import tensorflow as tf

keras = tf.keras
tf.config.threading.set_inter_op_parallelism_threads(1)
x = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
y = x[:, :1]

class Own(keras.Model):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.dense = keras.layers.Dense(1, kernel_initializer="ones")
    def call(self, x):
        return self.dense(x)
    def loss_of(self, x, y):
        if self.kind == "keras":
            return self.compute_loss(x, y, self(x), None)
        if self.kind == "sum":
            return keras.losses.MeanSquaredError(reduction="sum")(y, self(x))
        return tf.reduce_mean(tf.square(y - self(x)))
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(x, y)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"loss": loss}

class Added(keras.layers.Layer):
    def call(self, x):
        self.add_loss(tf.reduce_mean(tf.square(x)))
        return x
model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2), Added()])
model.compile(keras.optimizers.SGD(1e-3, name="added"))
model.fit(x, batch_size=16, verbose=0)

told = {}
kinds = ("keras", "sum", "own", "own again")
for kind in kinds:
    model = Own(kind)
    model(x)
    model.compile(keras.optimizers.SGD(1e-3, name=kind.replace(" ", "_")), "mse")
    model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    told[kind] = model.dense.get_weights()[0].ravel().tolist()

try:
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(x))
    gradients = tape.gradient(loss, model.trainable_variables)
    keras.optimizers.SGD().apply_gradients(zip(gradients, model.trainable_variables))
    told["loop"] = "each rank trains for itself"
except (RuntimeError, ValueError) as error:
    told["loop"] = str(error)
print(json.dumps(told))
"""
OWN_STRATEGY = """\
import tensorflow as tf
with tf.distribute.OneDeviceStrategy("CPU:0").scope():
    tf.keras.layers.Dense(1)
"""

#: As the guide to `keras.distribution` has it, for several processes.
DISTRIBUTION = """\
import json, os, sys
import keras
import numpy as np
import tensorflow as tf

tf.config.threading.set_inter_op_parallelism_threads(1)
if len(sys.argv) > 2:
    addresses, size, rank = json.loads(sys.argv[2])
    keras.distribution.initialize(addresses, size, rank)
elif "GRADRING_WITH_STRATEGY" in os.environ:
    keras.distribution.initialize()
keras.distribution.set_distribution(keras.distribution.DataParallel())
keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(16)
model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
model.compile(keras.optimizers.Adam(1e-2), "mse")
history = model.fit(data, epochs=2, verbose=0).history["loss"]
told = [tf.distribute.get_strategy().num_replicas_in_sync, history, model.get_weights()[0].tolist()]
try:
    keras.distribution.initialize("127.0.0.1:1", 3, 2)
except (AttributeError, ValueError) as error:
    told.append(str(error))
print(json.dumps(told))
"""
#: What a distribution asks for and nobody does.
UNLIKE = """\
import json, sys
import keras

d = keras.distribution
if sys.argv[1] == "ModelParallel":
    layout = d.LayoutMap(d.DeviceMesh((1,), ["batch"], ["cpu:0"]))
    d.set_distribution(d.ModelParallel(layout_map=layout))
else:
    d.set_distribution(d.DataParallel(auto_shard_dataset=False))
keras.layers.Dense(1)
"""


#: Starts a script that uses Keras, between two trainings.
PARENT = """\
import json, subprocess, sys
import keras, numpy as np

x = np.ones((8, 2), "float32")
model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(x, x[:, :1], epochs=1, verbose=0)
child = "import keras, numpy as np; m = keras.Sequential([keras.layers.Dense(1)])" + (
    "; m.compile('sgd', 'mse'); x = np.ones((8, 2)); m.fit(x, x[:, :1], verbose=0)"
    "; print(m.distribute_strategy is None or m.distribute_strategy.num_replicas_in_sync)"
)
done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True)
model.fit(x, x[:, :1], epochs=1, verbose=0)
lines = [line for line in done.stderr.splitlines() if "trains alone" in line]
print(json.dumps([done.returncode, done.stdout.strip(), len(lines)]))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment_with_start_hook(tmp_path_factory.mktemp("installed") / "env")


def ran(python: Path, program: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end, alone or, with options of ``gradring run``, on its ranks."""
    launcher = ["-m", "gradring", "run", *words] if words else []
    return subprocess.run(
        [python, *launcher, program, program.parent],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=240,
    )


def written(directory: Path, text: str) -> Path:
    path = directory / "train.py"
    path.write_text(text)
    return path


def told_by(done: subprocess.CompletedProcess[str]) -> list[Any]:
    """What each rank prints, in JSON."""
    lines = sorted(done.stdout.splitlines())
    assert done.returncode == 0 and lines, done.stderr
    return [json.loads(line.partition("] ")[2]) for line in lines]


def lines_about(done: subprocess.CompletedProcess[str], words: str) -> list[str]:
    return [line for line in done.stderr.splitlines() if words in line]


def test_who_makes_mwms_gets_ours_under_every_name(python: Path, tmp_path: Path) -> None:
    done = ran(python, written(tmp_path, MWMS), "--as-mwms", "-np", "2")
    first, second = told_by(done)
    assert first == second
    replicas, history, _ = first
    assert replicas == 2 and history[1] < history[0]
    assert lines_about(done, "is gradring's Custom") == [
        "[0] gradring: tf.distribute.MultiWorkerMirroredStrategy is gradring's "
        "CustomCollectiveStrategy here (GRADRING_AS_MWMS), on 2 ranks; it has its own choice of "
        "implementation and timeout_seconds"
    ]
    line, _ = sorted(lines_about(done, "inherits"))
    assert line.startswith(
        "[0] gradring: __main__.Own inherits from tf.distribute.MultiWorkerMirrored"
    )


def test_a_script_for_one_machine_trains_on_two_ranks_as_alone(
    python: Path, tmp_path: Path
) -> None:
    program = written(tmp_path, SINGLE)
    alone, _ = json.loads(ran(python, program).stdout)
    done = ran(python, program, "--with-strategy", "-np", "2")
    first, second = told_by(done)
    assert first == second
    together, _ = first
    assert together.keys() == alone.keys()
    for name in alone:
        assert flat(together[name]) == pytest.approx(flat(alone[name]), rel=2e-5, abs=2e-6), name
    assert lines_about(done, "GRADRING_WITH_STRATEGY") == [
        "[0] gradring: models of Keras are trained by 2 ranks together here "
        "(GRADRING_WITH_STRATEGY): each batch is divided among them"
    ]


@pytest.mark.parametrize("legacy", ["0", "1"])
def test_a_step_of_its_own_trains_as_alone_or_is_named(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, legacy: str
) -> None:
    """A model of tf_keras has the rules of MirroredStrategy, which adds up means."""
    if legacy == "1":
        pytest.importorskip("tf_keras")
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", legacy)
    program = written(tmp_path, OWN_STEPS)
    alone = json.loads(ran(python, program).stdout)
    done = ran(python, program, "--with-strategy", "-np", "2")
    first, second = told_by(done)
    # An error names its rank.
    assert {**first, "loop": ""} == {**second, "loop": ""}
    for kind in ("keras", "sum") if legacy == "1" else ("keras", "sum", "own", "own again"):
        assert first[kind] == pytest.approx(alone[kind], rel=1e-5), kind
    assert alone["loop"] == "each rank trains for itself"
    if legacy == "0":
        assert first["loop"] == "each rank trains for itself"
        (line,) = lines_about(done, "outside of Keras' fit")
        assert line.startswith("[0] gradring: the optimizer 'sgd'")
        return
    # What is warned of: the steps are twice as long, and the fit went elsewhere.
    assert first["own"] != pytest.approx(alone["own"], rel=1e-3)
    # A loop outside of a strategy's `run` would train each rank for itself.
    assert "computes gradients outside of fit" in first["loop"]
    assert [
        line.partition(" applies gradients of a loss that is no loss")[0]
        for line in lines_about(done, "no loss of Keras")
    ] == [
        "[0] gradring: the optimizer 'own'",
        "[0] gradring: the optimizer 'own_again'",
    ]


OF_PARTS = """\
import json, os, sys
import numpy as np, tensorflow as tf, tf_keras as keras
x = np.random.default_rng(0).normal(size=(32, 6)).astype("float32")
y = (x > np.linspace(-1, 1, 32)[:, None]).astype("float32")
def total(y, p):
    return tf.reduce_sum((y - p) ** 2)
def dice(y, p):
    return 1 - 2 * tf.reduce_sum(y * p) / (tf.reduce_sum(y) + tf.reduce_sum(p))
def root(y, p):
    return tf.sqrt(tf.reduce_mean((y - p) ** 2))
found = {}
for loss, metric in ((total, "mae"), (dice, "mae"), ("mse", root)):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Dense(6, activation="sigmoid")])
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=[metric])
    history = model.fit(x, y, batch_size=8, shuffle=False, verbose=0).history
    weights = [np.ravel(each).tolist() for each in model.get_weights()]
    found[str(getattr(loss, "__name__", loss))] = [weights, history["loss"]]
with tf.GradientTape() as tape:  # as to show what a model looks at
    inputs = tf.constant(x)
    tape.watch(inputs)
    value = tf.reduce_sum(model(inputs))
found["by inputs"] = tape.gradient(value, inputs).shape.as_list()
print(json.dumps(found))
"""


def test_losses_and_metrics_of_tf_keras_that_parts_do_not_give_are_named(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum stays a sum."""
    pytest.importorskip("tf_keras")
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")
    program = written(tmp_path, OF_PARTS)
    alone = json.loads(ran(python, program).stdout)
    done = ran(python, program, "--with-strategy", "-np", "2")
    first, second = told_by(done)
    assert first == second
    for loss in ("total", "mse", "by inputs"):
        assert flat(first[loss]) == pytest.approx(flat(alone[loss]), rel=2e-5, abs=2e-6)
    assert flat(first["dice"]) != pytest.approx(flat(alone["dice"]), rel=1e-4)
    (begin,) = lines_about(done, "models of tf_keras are trained by 2 ranks")
    assert "the training may differ from that of one process" in begin
    (line,) = lines_about(done, "a loss is ")
    assert "divided by a sum over data" in line
    (line,) = lines_about(done, "a value of the metric")
    assert "'root' is no linear function of a mean" in line


def flat(value: Any) -> list[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        return [value]
    return [number for part in value for number in flat(part)]


@pytest.fixture(scope="module")
def data_parallel(python: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A program with a `keras.distribution.DataParallel`, and what it tells in one process."""
    program = written(tmp_path_factory.mktemp("distribution"), DISTRIBUTION)
    return program, json.loads(ran(python, program).stdout)


def test_a_distribution_of_keras_trains_together(
    python: Path, data_parallel: tuple[Path, list[Any]]
) -> None:
    program, alone = data_parallel
    first, second = told_by(ran(python, program, "--with-strategy", "-np", "2"))
    assert first[:3] == second[:3]
    assert (alone[0], first[0]) == (1, 1)  # replicas that the program sees
    assert flat(first[1:3]) == pytest.approx(flat(alone[1:3]), rel=2e-5)
    # Keras itself has nothing to call on TensorFlow.
    assert "no attribute 'initialize'" in alone[3]
    assert "rank 2 of 3 according to Keras variables" in first[3]


def test_what_keras_is_told_of_its_processes_makes_the_group(
    python: Path, data_parallel: tuple[Path, list[Any]]
) -> None:
    """By variables, as a launch script sets them, or by the arguments of `initialize`."""
    program, alone = data_parallel
    listening = f"127.0.0.1:{free_ports(1)[0]}"
    asked = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "GRADRING_WITH_STRATEGY": "1"}
    told = {
        "KERAS_DISTRIBUTION_JOB_ADDRESSES": f"{listening},127.0.0.1:1",
        "KERAS_DISTRIBUTION_NUM_PROCESSES": "2",
        "KERAS_DISTRIBUTION_PROCESS_ID": "0",
    }
    by_variables = [str(python), str(program), str(program.parent)]
    by_arguments = [*by_variables, json.dumps([listening, 2, 1])]
    ranks = [
        subprocess.Popen(
            command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for command, environ in ((by_variables, asked | told), (by_arguments, asked))
    ]
    outputs = [rank.communicate(timeout=240) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    first, second = (json.loads(output) for output, _ in outputs)
    assert first[:3] == second[:3]
    assert flat(first[1:3]) == pytest.approx(flat(alone[1:3]), rel=2e-5)
    for rank, told_late in enumerate((first[3], second[3])):
        assert f"been of rank {rank} of 2 since their first layer was made" in told_late


def test_what_a_distribution_asks_for_and_nobody_does_is_said(python: Path, tmp_path: Path) -> None:
    program = written(tmp_path, UNLIKE)
    command = [python, program]
    asked = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "GRADRING_WITH_STRATEGY": "1"}
    parallel, parts = (
        subprocess.run([*command, kind], env=asked, capture_output=True, text=True, timeout=240)
        for kind in ("ModelParallel", "parts")
    )
    assert parallel.returncode == 0, parallel.stderr
    assert "a ModelParallel of keras.distribution divides no variables" in parallel.stderr
    assert parts.returncode == 1
    assert "DataParallel says auto_shard_dataset=False" in parts.stderr


def test_a_strategy_of_the_program_stays(python: Path, tmp_path: Path) -> None:
    done = ran(python, written(tmp_path, OWN_STRATEGY), "--with-strategy", "-np", "1")
    assert done.returncode == 0, done.stderr
    (line,) = lines_about(done, "GRADRING_WITH_STRATEGY")
    assert line.startswith(
        "[0] gradring: this program has a OneDeviceStrategy of its own, so it gets none"
    )


def test_keras_on_another_backend_is_left_alone(python: Path, tmp_path: Path) -> None:
    """It imports no TensorFlow, which need not be there."""
    layers = tmp_path / "keras" / "src" / "layers"
    layers.mkdir(parents=True)
    for package in (layers, *list(layers.parents)[:2]):
        (package / "__init__.py").touch()
    (layers / "layer.py").write_text("class Layer: pass\n")
    text = "import sys\nfrom keras.src.layers.layer import Layer\nLayer()\n"
    program = written(tmp_path, text + "print('tensorflow' in sys.modules, sys.meta_path[0])\n")
    done = ran(python, program, "--with-strategy", "-np", "1")
    assert done.stdout.startswith("[0] False <gradring_start._StandIns"), done.stderr


def test_a_script_that_a_rank_starts_trains_alone(python: Path, tmp_path: Path) -> None:
    done = ran(python, written(tmp_path, PARENT), "--with-strategy", "-np", "2")
    assert told_by(done) == [[0, "1", 1]] * 2
