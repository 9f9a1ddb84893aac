"""CustomCollectiveStrategy: what it, its replicas and its variables give two workers."""

from typing import Any

import numpy as np
import pytest
from tf_worker import join

from gradring.machine.ports import free_ports
from gradring.testing import run_ranks

Ranks = list[dict[Any, Any]]

#: What one `ReplicaContext.all_reduce` takes together; TensorFlow's strategy takes one of them.
DTYPES = ("float32", "float16", "bfloat16", "float64", "int32", "int64", "uint8")

THIRD = pytest.approx(1 / 3)
#: By name in `semantics`, what ranks 0 and 1 get.
EXPECTED: dict[str, list[Any]] = {
    "sum over a dimension": [1.0, 1.0],
    # Of 0 on rank 0, and 0 and 1 on rank 1.
    "mean over a dimension": [THIRD, THIRD],
    "mean over a dimension in a graph": [THIRD, THIRD],
    "scalar": [0.5, 0.5],
    "nest": [{"a": 1.0, "b": (2, [2.0, 2.0])}] * 2,
    "integer mean": [0.5, 0.5],
    "gather": [[[0.0, 1.0, 1.0]]] * 2,
    "device": ["/job:localhost/replica:0/task:0/device:CPU:0"] * 2,
    "copied": [True, True],
    "replica": [([1.0, 2], {"x": 0.5}, 1.0, rank) for rank in (0, 1)],
    "replica in a graph": [([1.0, 2], {"x": 0.5}, 1.0, rank) for rank in (0, 1)],
    "function in a replica": [([0.0, 1.0], 1.0)] * 2,
    "conditional": [1.0, 1.0],
    "dtypes": [[3.0 for _ in DTYPES]] * 2,
    "dtypes in a graph": [[3.0 for _ in DTYPES]] * 2,
    "loop": [8.5, 8.5],
    # Variables are aggregated as they say.
    "on write": [3.5, 3.5],
    "on read": [3.0, 3.0],
    # Values and datasets from functions are each worker's own.
    "values from function": [((0, 2),), ((1, 2),)],
    "from function": [[0, 1], [10, 11]],
    # The strategy presents itself as one of several workers.
    "local": [(0.0,), (1.0,)],
    "task": [("worker", 0), ("worker", 1)],
    "is a": [True, True],
    "in multi-worker mode": [True, True],
    "communicator": [True, True],
    "chief checkpoints": [True, False],
}


def semantics() -> Any:
    import copy

    import tensorflow as tf

    from gradring.tensorflow import CustomCollectiveStrategy
    from gradring.tensorflow.graph.ops import current_communicator

    with join() as comm:
        strategy = CustomCollectiveStrategy(communicator=comm)
        rank = float(comm.rank)

        def uneven() -> Any:
            return tf.range(comm.rank + 1, dtype=tf.float32)

        def in_replica() -> Any:
            context = tf.distribute.get_replica_context()
            total = context.all_reduce("SUM", [tf.constant(rank), tf.constant(1)])
            mean = context.all_reduce(tf.distribute.ReduceOp.MEAN, {"x": tf.constant(rank)})
            merged = context.merge_call(add_up, (tf.constant(rank),))
            return total, mean, merged, context.replica_id_in_sync_group

        def add_up(strategy: Any, value: Any) -> Any:
            return strategy.extended.reduce_to("SUM", value, value)

        def conditional(flag: Any) -> Any:
            def reduced() -> Any:
                return tf.distribute.get_replica_context().all_reduce("SUM", tf.constant(rank))

            return tf.cond(flag, reduced, lambda: tf.constant(-1.0))

        def gathered() -> Any:
            """Rank 0 has one column, and rank 1 two."""
            gather = tf.distribute.get_replica_context().all_gather
            own = tf.fill([1, comm.rank + 1], rank)
            x = tf.fill([comm.rank + 1], rank + 1.0)
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(gather(x * x, 0) * tf.constant([1.0, 2.0, 3.0]))
            return {
                "columns": gather(own, 1),
                "columns, counted from the end": gather(own, -1),
                "columns, chosen by a tensor": gather(own, tf.constant(1)),
                "nest": gather({"rows": own[0], "numbers": (tf.constant([comm.rank]),)}, 0),
                "bool": gather(own == 1.0, 1),
                "complex": gather(tf.complex(own, own), 1),
                "in a conditional": tf.cond(own[0, 0] < 2.0, lambda: gather(own, 1), lambda: own),
                "in a function": tf.function(lambda: gather(own, 1))(),
                "gradient": tape.gradient(loss, x),
            }

        def dtypes() -> Any:
            """One call for all of them."""
            values = [tf.cast(tf.constant(comm.rank + 1), dtype) for dtype in DTYPES]
            totals = tf.distribute.get_replica_context().all_reduce("SUM", values)
            for total, dtype in zip(totals, DTYPES, strict=True):
                tf.debugging.assert_type(total, dtype)
            return [tf.cast(total, tf.float64) for total in totals]

        def in_loop() -> Any:
            context, x = tf.distribute.get_replica_context(), tf.constant(1.0)
            for _ in tf.range(3):
                x = context.all_reduce("SUM", x)
            nested = tf.function(lambda x: context.all_reduce("MEAN", x + rank))
            return nested(x)

        def refused(call: Any, kinds: Any = (TypeError, ValueError)) -> str:
            with pytest.raises(kinds) as raised:
                call()
            return str(raised.value)

        def function_in_replica() -> Any:
            context = tf.distribute.get_replica_context()
            gathered = context.all_gather(tf.identity([rank]), axis=0)
            return gathered, context.merge_call(add_up, (tf.identity(rank),))

        def reduce(op: str, axis: int) -> Any:
            return strategy.reduce(op, strategy.run(uneven), axis=axis)

        def device_of_a_reduction() -> Any:
            return strategy.extended.reduce_to("SUM", tf.constant(rank), "/cpu:0").device

        def traced(function: Any) -> Any:
            found = []
            tf.function(lambda: found.append(function())).get_concrete_function()
            return found[0]

        def in_a_graph_of_tensorflow_1() -> None:
            with tf.Graph().as_default():
                strategy.reduce("SUM", tf.constant(rank), axis=None)

        with strategy.scope():
            on_write = tf.Variable(rank, aggregation=tf.VariableAggregation.MEAN)
            on_read = tf.Variable(
                rank + 1,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )
            found_communicator = current_communicator() is comm
        strategy.run(lambda: on_write.assign(tf.constant(rank + 3)))
        strategy.run(lambda: on_read.assign(rank + 1))
        from_function = strategy.distribute_datasets_from_function(
            lambda context: tf.data.Dataset.range(2).map(
                lambda i: i + 10 * context.input_pipeline_id
            )
        )
        results = {
            "sum over a dimension": float(reduce("SUM", 0)),
            "mean over a dimension": float(reduce("MEAN", 0)),
            "mean over a dimension in a graph": float(tf.function(reduce)("MEAN", 0)),
            "scalar": float(strategy.reduce("MEAN", strategy.run(lambda: rank), axis=0)),
            "nest": strategy.reduce("SUM", {"a": rank, "b": (1, tf.ones([2]))}, axis=None),
            "integer mean": float(strategy.reduce("MEAN", tf.constant(comm.rank), axis=None)),
            "replica": strategy.run(in_replica),
            "replica in a graph": tf.function(lambda: strategy.run(in_replica))(),
            "function in a replica": strategy.run(tf.function(function_in_replica)),
            "device": traced(device_of_a_reduction),
            "copied": copy.deepcopy(strategy) is strategy,
            "conditional": tf.function(lambda f: strategy.run(conditional, (f,)))(
                tf.constant(True)
            ),
            "gathered": strategy.run(gathered),
            "gathered in a graph": tf.function(lambda: strategy.run(gathered))(),
            "dtypes": strategy.run(dtypes),
            "dtypes in a graph": tf.function(lambda: strategy.run(dtypes))(),
            "loop": tf.function(lambda: strategy.run(in_loop))(),
            "values from function": strategy.experimental_local_results(
                strategy.experimental_distribute_values_from_function(
                    lambda context: (context.replica_id_in_sync_group, context.num_replicas_in_sync)
                )
            ),
            "refused": {
                "bool": refused(lambda: strategy.reduce("SUM", tf.constant(True), axis=None)),
                "text": refused(lambda: strategy.gather(tf.constant(["text"]), axis=0)),
                "axis": refused(lambda: strategy.gather(tf.ones([2]), axis=1)),
                "scalar": refused(lambda: strategy.gather(tf.constant(1.0), axis=0)),
                "rows": refused(lambda: strategy.gather(tf.ragged.constant([[1.0]]), axis=0)),
                "graph of TensorFlow 1": refused(in_a_graph_of_tensorflow_1, NotImplementedError),
            },
            "gather": strategy.gather(tf.fill([1, comm.rank + 1], rank), axis=1),
            "local": strategy.experimental_local_results(strategy.run(lambda: rank)),
            "on write": on_write,
            "on read": on_read,
            "from function": [
                int(strategy.experimental_local_results(x)[0]) for x in from_function
            ],
            "communicator": found_communicator,
            "chief checkpoints": strategy.extended.should_checkpoint,
            "task": (strategy.cluster_resolver.task_type, strategy.cluster_resolver.task_id),
            "is a": isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy),
            "in multi-worker mode": strategy.extended._in_multi_worker_mode(),
        }
        return tf.nest.map_structure(
            lambda v: v.numpy().tolist() if hasattr(v, "numpy") else v, results
        )


@pytest.fixture(scope="module")
def ranks() -> Any:
    return run_ranks(semantics, 2)


@pytest.mark.parametrize("name", EXPECTED)
def test_ranks_get_what_a_strategy_of_tensorflow_gives(ranks: Ranks, name: str) -> None:
    assert [result[name] for result in ranks] == EXPECTED[name]


@pytest.mark.parametrize("where", ["gathered", "gathered in a graph"])
def test_a_replica_gathers_uneven_tensors_along_any_dimension(ranks: Ranks, where: str) -> None:
    for rank, result in enumerate(ranks):
        found = result[where]
        gradient = found.pop("gradient")
        assert found == {
            "columns": [[0.0, 1.0, 1.0]],
            "columns, counted from the end": [[0.0, 1.0, 1.0]],
            "columns, chosen by a tensor": [[0.0, 1.0, 1.0]],
            "nest": {"rows": [0.0, 1.0, 1.0], "numbers": ([0, 1],)},
            "bool": [[False, True, True]],
            "complex": [[0j, 1 + 1j, 1 + 1j]],
            "in a conditional": [[0.0, 1.0, 1.0]],
            "in a function": [[0.0, 1.0, 1.0]],
        }
        # The sum of both ranks' losses, with respect to a rank's own part.
        assert gradient == [[4.0], [16.0, 24.0]][rank]


def test_what_cannot_be_reduced_or_gathered_is_refused_in_words(ranks: Ranks) -> None:
    for result in ranks:
        said = result["refused"]
        assert "bool cannot be reduced; cast it to one of float32" in said["bool"]
        assert "string has no fixed width" in said["text"]
        assert "axis=1" in said["axis"] and "(2,)" in said["axis"]
        assert "axis=0" in said["scalar"] and "()" in said["scalar"]
        assert "gather" in said["rows"] and "RaggedTensor" in said["rows"]
        assert "inside tf.function" in said["graph of TensorFlow 1"]


def from_resolver(addresses: list[str]) -> Any:
    import os

    import tensorflow as tf

    from gradring.tensorflow import CustomCollectiveStrategy

    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"chief": addresses[:1], "worker": addresses[1:]}),
        task_type="chief" if os.environ["GRADRING_RANK"] == "0" else "worker",
        task_id=0,
    )
    strategy = CustomCollectiveStrategy(resolver)
    total = float(strategy.reduce("SUM", 1.0, axis=None))
    return strategy.communicator.rank, total, strategy.cluster_resolver is resolver


def test_a_cluster_resolver_describes_the_group() -> None:
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    found = run_ranks(from_resolver, 2, addresses)
    assert found == [(0, 2.0, True), (1, 2.0, True)]


def become_ranks_of_mpirun(job: str) -> None:
    """Leaves this process the variables of Open MPI on one host alone."""
    import os

    from gradring.clusters import without_cluster_variables

    place = {name: os.environ[f"GRADRING_{name}"] for name in ("RANK", "WORLD_SIZE")}
    for name in set(os.environ) - set(without_cluster_variables(os.environ)):
        del os.environ[name]
    os.environ["OMPI_COMM_WORLD_RANK"] = place["RANK"]
    os.environ["OMPI_COMM_WORLD_SIZE"] = os.environ["OMPI_COMM_WORLD_LOCAL_SIZE"] = place[
        "WORLD_SIZE"
    ]
    os.environ["PMIX_NAMESPACE"] = job


def by_mpi_cluster_resolver(job: str, ports: tuple[int, int], of_tensorflow: bool) -> Any:
    import os

    import tensorflow as tf

    import gradring.tensorflow

    become_ranks_of_mpirun(job)
    os.environ["GRADRING_PORT"] = f"{ports[0]}-{ports[1]}"
    resolver = gradring.tensorflow.MPIClusterResolver(environment="a cluster")
    strategy: Any
    if of_tensorflow:
        strategy = tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)
    else:
        strategy = gradring.tensorflow.CustomCollectiveStrategy(resolver)
        assert strategy.communicator.rank == resolver.task_id
    assert strategy.cluster_resolver is resolver
    base = tf.distribute.cluster_resolver.ClusterResolver
    assert isinstance(resolver, base)
    assert type(resolver).num_accelerators is base.num_accelerators

    def total() -> Any:
        own = tf.constant(1.0 + resolver.task_id)
        return tf.distribute.get_replica_context().all_reduce("SUM", own)

    return {
        "sum": float(strategy.run(total)),
        "task": (resolver.task_type, resolver.task_id),
        "master": resolver.master(),
        "of rank 1": resolver.master("worker", 1, "grpcs"),
        "workers": resolver.cluster_spec().as_dict()["worker"],
        "rest": (resolver.rpc_layer, resolver.environment, resolver.num_accelerators()),
    }


@pytest.mark.parametrize("of_tensorflow", [True, False])
def test_a_resolver_describes_ranks_of_mpirun_to_strategies(of_tensorflow: bool) -> None:
    """TensorFlow's strategy connects to its addresses; ours joins the group of the variables."""
    (first,) = free_ports(1)
    ports = (first, first + 40)
    found = run_ranks(by_mpi_cluster_resolver, 2, f"job-{first}", ports, of_tensorflow)
    workers = found[0]["workers"]
    assert {address.rpartition(":")[0] for address in workers} == {"127.0.0.1"}
    chosen = {int(address.rpartition(":")[2]) for address in workers}
    assert len(chosen) == 2 and all(ports[0] <= port <= ports[1] for port in chosen)
    assert found == [
        {
            "sum": 3.0,
            "task": ("worker", rank),
            "master": f"grpc://{workers[rank]}",
            "of rank 1": f"grpcs://{workers[1]}",
            "workers": workers,
            "rest": ("grpc", "a cluster", {}),
        }
        for rank in (0, 1)
    ]


def alone_by_mpi_cluster_resolver() -> Any:
    from gradring.tensorflow import CustomCollectiveStrategy, MPIClusterResolver

    become_ranks_of_mpirun("alone")
    resolver = MPIClusterResolver()
    strategy = CustomCollectiveStrategy(resolver)
    return resolver.cluster_spec().num_tasks("worker"), strategy.num_replicas_in_sync


def test_a_resolver_of_one_process_is_a_cluster_of_one() -> None:
    assert run_ranks(alone_by_mpi_cluster_resolver, 1) == [(1, 1)]


def evaluate_beside_the_group() -> Any:
    import json
    import os

    import keras
    import tensorflow as tf

    from gradring.clusters import without_cluster_variables
    from gradring.tensorflow import CustomCollectiveStrategy

    for name in set(os.environ) - set(without_cluster_variables(os.environ)):
        del os.environ[name]
    # Nobody listens at these addresses: the workers may not have started, or have ended.
    cluster = {"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2", "127.0.0.1:3"]}
    task = {"type": "evaluator", "index": 0}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
    found = []
    for resolver in (None, tf.distribute.cluster_resolver.TFConfigClusterResolver()):
        strategy = CustomCollectiveStrategy(resolver)
        with strategy.scope():
            model = keras.Sequential([keras.layers.Dense(1, kernel_initializer="ones")])
            model.compile(loss="mse")
        loss = model.evaluate(np.ones((8, 2), "float32"), np.zeros((8, 1)), batch_size=4, verbose=0)
        replicas = strategy.num_replicas_in_sync
        found.append((replicas, strategy.cluster_resolver.task_type, float(loss)))
    return found


def test_an_evaluator_works_alone() -> None:
    (found,) = run_ranks(evaluate_beside_the_group, 1)
    assert found == [(1, "evaluator", 4.0)] * 2
