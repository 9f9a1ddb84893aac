"""Several local devices per process: two processes of two CPUs each against one process of one."""

from typing import Any

import pytest

from gradring.testing import run_ranks
from support.chosen import chosen, marked
from support.keras_models import assert_trained_alike, train_by_fit, train_by_loop
from support.tf_worker import join

DEVICES = 2
WORLD_SIZE = 2

TOLERANCE = 1e-5

#: Ways of training and their arguments.
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "fit": (train_by_fit, {"kind": "mlp", "optimizer": "Adam"}),
    "fit, eagerly": (
        train_by_fit,
        {"kind": "mlp", "optimizer": "SGD momentum", "run": {"run_eagerly": True}},
    ),
    "fit, clipped": (train_by_fit, {"kind": "mlp", "optimizer": "SGD", "global_clipnorm": 0.05}),
    "fit, embedding": (train_by_fit, {"kind": "embedding", "optimizer": "Adam"}),
    "loop": (train_by_loop, {"kind": "mlp", "optimizer": "AdamW"}),
    "loop, normalised": (train_by_loop, {"kind": "synchronised BN", "optimizer": "SGD"}),
}
#: In every run of the tests: each way, with what needs the gradients or the batch of all replicas.
QUICK = ("fit, clipped", "loop, normalised")


def worker(cases: list[str]) -> Any:
    import keras
    import tensorflow as tf

    from gradring.tensorflow import CustomCollectiveStrategy

    comm = join()
    (cpu,) = tf.config.list_physical_devices("CPU")
    logical = [tf.config.LogicalDeviceConfiguration() for _ in range(DEVICES)]
    tf.config.set_logical_device_configuration(cpu, logical)
    with comm:

        def strategy_of() -> Any:
            devices = [f"CPU:{i}" for i in range(DEVICES)]
            return CustomCollectiveStrategy(communicator=comm, devices=devices)

        results = {}
        for name in cases:
            train, arguments = CASES[name]
            keras.backend.clear_session()
            keras.utils.set_random_seed(comm.rank + 1)
            strategy = tf.distribute.get_strategy() if comm.world_size == 1 else strategy_of()
            results[name] = train(strategy, **arguments)
        if comm.world_size == 1:
            keras.utils.set_random_seed(1)
            results["two replicas"] = train_by_fit(strategy_of(), **CASES["fit, clipped"][1])
        else:
            results["eager"] = semantics(strategy_of(), lambda fn: fn)
            results["graph"] = semantics(strategy_of(), tf.function)
            results["refusals"] = refusals(comm)
        return results


def semantics(strategy: Any, mode: Any) -> Any:
    """What replicas 0 to 3 make together; replicas 2 and 3 belong to rank 1."""
    import tensorflow as tf

    with strategy.scope():
        on_write = tf.Variable(0.0, aggregation=tf.VariableAggregation.MEAN)
        on_read = tf.Variable(
            0.0,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )

    def replica() -> Any:
        context = tf.distribute.get_replica_context()
        number = tf.cast(context.replica_id_in_sync_group, tf.float32)
        on_write.assign(number)
        on_read.assign(number + 1.0)
        x = tf.fill([2], number)
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = context.all_reduce("SUM", x) * (number + 1.0)
        slices = tf.IndexedSlices(x[:1], tf.cast(x[:1] / 2.0, tf.int32), tf.constant([2]))
        return {
            "id": number,
            "mixed dtypes": context.all_reduce(
                "SUM", [x, tf.constant(1), {"d": tf.ones([], tf.float64)}]
            ),
            "mean": context.all_reduce("MEAN", number),
            "integer mean": context.all_reduce("MEAN", tf.cast(number, tf.int32)),
            "all gather": context.all_gather(number[tf.newaxis], 0),
            "uneven": context.all_gather(tf.fill([1, tf.cast(number, tf.int32)], number), 1),
            "merged": context.merge_call(add_up, (number,)),
            "gradient": tape.gradient(total, x),
            "rows": tf.convert_to_tensor(context.all_reduce("SUM", slices)),
        }

    def add_up(strategy: Any, value: Any) -> Any:
        return strategy.extended.reduce_to("SUM", value, value)

    def step() -> Any:
        per_replica = strategy.run(replica)
        number = per_replica["id"]
        reduced = {
            "sum": strategy.reduce("SUM", number, axis=None),
            "mean": strategy.reduce("MEAN", number, axis=None),
            "sum of a host's value": strategy.reduce("SUM", 1.0, axis=None),
            "nest": strategy.reduce("SUM", {"a": number, "b": (number,)}, axis=None),
            "mean over a dimension": strategy.reduce("MEAN", per_replica["uneven"], axis=1),
            "gather": strategy.gather(per_replica["all gather"], axis=0),
            "update": strategy.broadcast_update(lambda: on_write + 1.0),
        }
        return per_replica, reduced

    per_replica, reduced = mode(step)()
    local = [
        tf.nest.map_structure(
            lambda value, i=i: strategy.experimental_local_results(value)[i].numpy().tolist(),
            per_replica,
        )
        for i in range(DEVICES)
    ]
    return {
        "replicas": strategy.num_replicas_in_sync,
        "local": local,
        "reduced": tf.nest.map_structure(lambda v: v.numpy().tolist(), reduced),
        "on write": [float(v) for v in strategy.experimental_local_results(on_write)],
        "on read": float(on_read.read_value()),
    }


def refusals(comm: Any) -> list[str]:
    """What is said of wrong devices; the ranks' numbers of them are compared last."""
    from gradring.errors import ConfigError
    from gradring.tensorflow import CustomCollectiveStrategy

    said = []
    both = ["CPU:0", "CPU:1"]
    unequal = both[: comm.rank + 1]
    cases: list[tuple[Any, Any]] = [([], None), (["CPU:0", "CPU:0"], None), (["CPU:7"], None)]
    for devices, check in (*cases, (both, "warn"), (unequal, None)):
        with pytest.raises(ConfigError) as raised:
            CustomCollectiveStrategy(communicator=comm, devices=devices, check_gradients=check)
        said.append(str(raised.value))
    return said


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Any:
    return run_ranks(worker, WORLD_SIZE, chosen(request, "case"), timeout=240)


@pytest.fixture(scope="module")
def alone(request: pytest.FixtureRequest) -> Any:
    return run_ranks(worker, 1, chosen(request, "case"), timeout=240)[0]


@pytest.mark.parametrize("case", marked(CASES, QUICK))
def test_four_replicas_train_as_one_process(ranks: Any, alone: Any, case: str) -> None:
    assert_trained_alike([rank[case] for rank in ranks], alone[case], TOLERANCE)


def test_two_replicas_of_one_process_train_as_one(alone: Any) -> None:
    assert_trained_alike([alone["two replicas"]], alone["fit, clipped"], TOLERANCE)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_replicas_of_all_devices_meet(ranks: Any, mode: str) -> None:
    """In the replicas, and in what the strategy reduces and gathers of them."""
    everywhere = {
        "mixed dtypes": [[6.0, 6.0], 4, {"d": 4.0}],
        "mean": 1.5,
        "integer mean": 1.5,
        "all gather": [0.0, 1.0, 2.0, 3.0],
        "uneven": [[1.0, 2.0, 2.0, 3.0, 3.0, 3.0]],
        "merged": 6.0,
        "gradient": [10.0, 10.0],
        "rows": [1.0, 5.0],
    }
    for rank, result in enumerate(ranks):
        found = result[mode]
        assert found["replicas"] == 4
        assert [local["id"] for local in found["local"]] == [2.0 * rank, 2.0 * rank + 1.0]
        for local in found["local"]:
            assert {name: local[name] for name in everywhere} == everywhere
        assert found["on write"] == [1.5, 1.5]
        assert found["on read"] == 10.0
        assert found["reduced"] == {
            "sum": 6.0,
            "mean": 1.5,
            # A value of the process counts once, however many devices the process has.
            "sum of a host's value": 2.0,
            "nest": {"a": 6.0, "b": (6.0,)},
            "mean over a dimension": pytest.approx([14 / 6]),
            "gather": [0.0, 1.0, 2.0, 3.0] * 4,
            "update": 2.5,
        }


def test_wrong_devices_are_refused_on_every_rank(ranks: Any) -> None:
    for rank, result in enumerate(ranks):
        none, twice, unknown, checked, unequal = result["refusals"]
        assert checked.startswith(f"check_gradients='warn' on rank {rank} of ")
        for said in (none, twice, unknown):
            assert f"rank {rank} of " in said and "/device:CPU:0, /device:CPU:1" in said
        assert f"rank {rank} of " in unequal and "[1, 2]" in unequal
