"""`tf.device("/job:ps/task:1")` in the scope of a strategy, and `placement`, by names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gradring
from gradring import updates
from gradring.errors import ConfigError
from gradring.machine.ports import free_ports
from gradring.testing import run_ranks
from support.keras_models import needs_fit
from support.served import RATE, one_weight, serving

pytestmark = needs_fit

WIDTH, STEPS = 10_000, 5
BY_BLOCK = updates.ParameterServer()
#: Names of devices, and which server they mean.
DEVICES = {
    "/job:ps/task:0": 0,
    "/job:ps/task:1": 1,
    "/job:ps/replica:0/task:1/device:CPU:0": 1,
    "/job:ps/task:1/cpu:0": 1,
    "job:ps/task:1": 1,
    "/job:ps": None,
    "/job:worker": None,
    "/job:worker/device:CPU:0": None,
    "/device:CPU:0": None,
}


def job() -> dict[str, Any]:
    with gradring.init() as comm:
        return {
            "other rules": other_rules(comm),
            "blocks": blocks(comm),
            "layers": layers(comm),
            "trained": {
                how: trained(comm, *how_to)
                for how, how_to in {
                    "by block": (BY_BLOCK, "/job:ps/task:1"),
                    "by name": (updates.ParameterServer(placement={"w": 1, "v": 0}), None),
                    "by full name": (updates.ParameterServer(placement={"w:0": 1}), None),
                    "by both": (updates.ParameterServer(placement={"w": 1}), "/job:ps/task:1"),
                }.items()
            },
            "contradiction": contradiction(comm),
        }


def says(act: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        act()
    return str(caught.value)


def other_rules(comm: Any) -> dict[str, str]:
    import tensorflow as tf

    from gradring.tensorflow import CustomCollectiveStrategy

    found = {}
    for rule in (updates.AllReduce(), updates.Primary(), updates.LocalSGD()):
        strategy = CustomCollectiveStrategy(communicator=comm, update=rule)
        with strategy.scope():
            found[str(rule)] = says(lambda: tf.device("/job:ps/task:0"))
    return found


def blocks(comm: Any) -> dict[str, Any]:
    """Which server variables remember, and where they are."""
    import keras
    import tensorflow as tf

    from gradring.tensorflow import CustomCollectiveStrategy
    from gradring.tensorflow.cluster.placement import server_of

    def made(*devices: Any) -> Any:
        if not devices:
            # Its value is computed in the block, too.
            variable = tf.Variable(tf.random.normal([2]), name="w")
            return server_of(variable), variable.device
        with tf.device(devices[0]):
            return made(*devices[1:])

    @tf.function  # type: ignore[untyped-decorator]
    def in_a_graph() -> Any:
        if not variables:
            with tf.device("/job:ps/task:1"):
                variables.append(tf.Variable([1.0]))
        return variables[0] + 1.0

    variables: list[Any] = []
    with serving(comm, BY_BLOCK, servers=2):
        strategy = CustomCollectiveStrategy(update=BY_BLOCK)
        with strategy.scope():
            found = {name: made(name) for name in DEVICES}
            found["a spec"] = made(tf.DeviceSpec(job="ps", task=1))
            found["inside"] = made("/job:ps/task:1", "/cpu:0")
            found["cleared"] = made("/job:ps/task:1", None)
            found["nested"] = made("/job:ps/task:1", "/job:ps/task:0")
            found["local"] = made("/job:ps/task:1", "/job:localhost")
            own = f"/job:worker/replica:0/task:{comm.rank}"
            found["own"] = made("/job:ps/task:1", own)
            found["own device"] = made(f"{own}/device:CPU:0")
            found["inside of own"] = made(own, "/job:ps/task:1")
            other = f"/job:worker/task:{1 - comm.rank}"
            found["other"] = says(lambda: tf.device(other))
            found["chief"] = says(lambda: tf.device("/job:chief"))
            found["computed"] = computed(strategy, own)
            found["after"] = made()
            with tf.compat.v1.device("/job:ps/task:1"):
                found["by its old name"] = made()
            with keras.device("/job:ps/task:1"):
                found["by Keras"] = made()
            strategy.run(lambda: found.update(replica=made("/job:ps/task:1")))
            assert in_a_graph().numpy() == 2
            found["in a graph"] = server_of(variables[0]), variables[0].device
            found["no such server"] = says(lambda: tf.device("/job:ps/task:2"))
        # Outside of the scope, the name is TensorFlow's business.
        with pytest.raises(tf.errors.InvalidArgumentError, match="/job:ps"):
            made("/job:ps/task:1")
        train_once(strategy)
    return found


def computed(strategy: Any, device: str) -> list[float]:
    """Sums in a block: eager, in a graph, and in a replica's step."""
    import tensorflow as tf

    def total() -> Any:
        with tf.device(device):
            return tf.reduce_sum(tf.ones([3]))

    graph = tf.function(lambda: strategy.run(total))
    return [float(each) for each in (total(), tf.function(total)(), graph())]


def train_once(strategy: Any) -> None:
    """Servers end when there have been workers, and all have left."""
    _, step = one_weight(strategy)
    step()
    strategy.leave()


def layers(comm: Any) -> Any:
    """A model of which a layer is made in a block, and trained by `fit`."""
    import keras
    import tensorflow as tf

    from gradring.tensorflow import CustomCollectiveStrategy
    from gradring.tensorflow.cluster.placement import server_of

    made: list[Any] = []
    with serving(comm, BY_BLOCK, servers=2, made=made) as counted:
        strategy = CustomCollectiveStrategy(update=BY_BLOCK)
        with strategy.scope():
            inputs = keras.layers.Input((8,))
            with tf.device("/job:ps/task:1"):
                hidden = keras.layers.BatchNormalization()(keras.layers.Dense(WIDTH)(inputs))
            model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
            model.compile(keras.optimizers.Adam(), "mse")
        x = np.ones((32, 8), np.float32)
        model.fit(x, x[:, :1], batch_size=8, verbose=0)
        found = [server_of(variable) for variable in model.trainable_variables]
        strategy.leave()
    return found, [each["bytes_received"] for each in counted]


def trained(comm: Any, rule: updates.ParameterServer, device: str | None) -> Any:
    """A large variable that is placed, and a small one."""
    import contextlib

    import keras
    import tensorflow as tf

    from gradring.tensorflow import CustomCollectiveStrategy

    with serving(comm, rule, servers=2) as counted:
        strategy = CustomCollectiveStrategy(update=rule)
        with strategy.scope():
            with contextlib.nullcontext() if device is None else tf.device(device):
                w = tf.Variable(tf.ones([WIDTH]), name="w")
            v = tf.Variable([1.0], name="v")
            optimizer = keras.optimizers.SGD(RATE)

        def replica_step() -> None:
            gradients = [tf.ones_like(each) / comm.world_size for each in (w, v)]
            optimizer.apply_gradients(zip(gradients, (w, v), strict=True))

        @tf.function  # type: ignore[untyped-decorator]
        def step() -> None:
            strategy.run(replica_step)

        for _ in range(STEPS):
            step()
        strategy.leave()
    return [float(w.numpy().min()), float(w.numpy().max()), float(v.numpy()[0])], [
        each["bytes_sent"] for each in counted
    ]


def contradiction(comm: Any) -> str:
    import keras
    import tensorflow as tf

    from gradring.tensorflow import CustomCollectiveStrategy

    rule = updates.ParameterServer(placement={"w": 0})
    with serving(comm, rule, servers=2):
        strategy = CustomCollectiveStrategy(update=rule)
        with strategy.scope():
            optimizer = keras.optimizers.SGD(RATE)
            with tf.device("/job:ps/task:1"):
                w = tf.Variable([1.0], name="w")

        def step() -> None:
            strategy.run(lambda: optimizer.apply_gradients([(tf.ones_like(w), w)]))

        said = says(step)
        assert said == says(step)
        train_once(strategy)
    return said


def beside_mwms(ports: tuple[int, int]) -> tuple[Any, str]:
    """In a process of one of TensorFlow's clusters: blocks of its full name, and of another."""
    import keras
    import tensorflow as tf

    from gradring.tensorflow import CustomCollectiveStrategy

    with gradring.init() as comm:
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({"worker": [f"127.0.0.1:{port}" for port in ports]}),
            task_type="worker",
            task_id=comm.rank,
            rpc_layer="grpc",
        )
        tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)
        own = tf.config.list_logical_devices("CPU")[0].name
        # Each rank is the only one of a group, so it is worker 0 there.
        strategy = CustomCollectiveStrategy(communicator=gradring.Communicator(0, 1))
        with strategy.scope():
            with tf.device(own):
                variable = tf.Variable(1.0)
            # Keras makes it in a block of its own.
            embedding = keras.Sequential([keras.layers.Embedding(8, 2)])
            embedding.build((None, 3))
            other = says(lambda: tf.device("/job:worker/task:2"))
        return (own, variable.device, len(embedding.weights)), other


@pytest.mark.usefixtures("fresh_interpreters")
def test_a_process_of_a_cluster_of_tensorflow_has_two_names() -> None:
    for rank, ((own, device, weights), other) in enumerate(
        run_ranks(beside_mwms, 2, tuple(free_ports(2)), timeout=100)
    ):
        assert own == device == f"/job:worker/replica:0/task:{rank}/device:CPU:0"
        assert weights == 1
        assert "names another process than this one, which is worker 0" in other


@pytest.fixture(scope="module")
def ranks() -> Any:
    return run_ranks(job, 2, timeout=280)


def test_other_rules_say_what_to_do(ranks: Any) -> None:
    for rank, found in enumerate(ranks):
        for rule, said in found["other rules"].items():
            assert said.startswith(f"tf.device('/job:ps/task:0') on rank {rank} of ")
            assert f"update={rule} has no parameter servers; pass update=updates.Par" in said
            assert "start servers by `gradring run -np 3 --ps 1`, or leave the device out" in said


@pytest.mark.parametrize("device", DEVICES)
def test_a_block_says_the_server_and_the_worker_has_the_variable(ranks: Any, device: str) -> None:
    for rank in ranks:
        server, where = rank["blocks"][device]
        assert server == DEVICES[device]
        assert "/job:localhost" in where and "CPU:0" in where


@pytest.mark.parametrize(
    ("how", "server"),
    [
        ("a spec", 1),
        ("inside", 1),
        ("cleared", None),
        ("nested", 0),
        ("local", None),
        ("own", None),
        ("own device", None),
        ("inside of own", 1),
        ("after", None),
        ("by its old name", 1),
        ("by Keras", 1),
        ("replica", 1),
        ("in a graph", 1),
    ],
)
def test_the_innermost_block_with_a_job_counts(ranks: Any, how: str, server: int | None) -> None:
    for rank in ranks:
        found, where = rank["blocks"][how]
        assert found == server and "/job:localhost" in where


def test_a_worker_executes_blocks_of_its_own_name(ranks: Any) -> None:
    for rank in ranks:
        assert rank["blocks"]["computed"] == [3.0] * 3


def test_a_block_of_another_worker_is_an_error(ranks: Any) -> None:
    for rank, found in enumerate(ranks):
        for what, name in (("other", f"/job:worker/task:{1 - rank}"), ("chief", "/job:chief")):
            words = f"tf.device({name!r}) names another process than this one, which is worker "
            assert f"{words}{rank} and executes the whole" in found["blocks"][what]


def test_a_server_that_there_is_not_is_an_error_with_their_number(ranks: Any) -> None:
    for rank in ranks:
        said = rank["blocks"]["no such server"]
        assert "tf.device('/job:ps/task:2') names server 2, and there are 2, counted from 0" in said


def test_a_block_that_contradicts_placement_is_an_error(ranks: Any) -> None:
    for rank in ranks:
        words = "tf.device has w on server 1, and placement on server 0; leave one of them out"
        assert words in rank["contradiction"]


@pytest.mark.parametrize("how", ["by block", "by name", "by full name", "by both"])
def test_a_placed_variable_trains_and_is_on_its_server_alone(ranks: Any, how: str) -> None:
    for rank in ranks:
        values, _ = rank["trained"][how]
        assert values == [1 - STEPS * RATE] * 3
    _, (first, second) = ranks[0]["trained"][how]
    pulls = (STEPS + 1) * len(ranks)
    assert second > pulls * WIDTH * 4 > 10 * first


def test_layers_of_a_block_are_on_its_server(ranks: Any) -> None:
    for rank in ranks:
        servers, _ = rank["layers"]
        assert servers == [1, 1, 1, 1, None, None]
    _, (first, second) = ranks[0]["layers"]
    assert second > first
