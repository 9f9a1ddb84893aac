"""CustomCollectiveStrategy: what it, its replicas and its variables give two workers."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from gradring.machine.ports import free_ports
from gradring.testing import run_ranks
from support.tf_worker import join

Ranks = list[dict[Any, Any]]

#: What one `ReplicaContext.all_reduce` takes together; TensorFlow's strategy takes one of them.
DTYPES = ("float32", "float16", "bfloat16", "float64", "int32", "int64", "uint8")
THIRD = pytest.approx(1 / 3)


@dataclass(frozen=True)
class Worker:
    """What a fact is about."""

    tf: Any
    strategy: Any
    comm: Any

    @property
    def number(self) -> float:
        """The rank, as what is reduced."""
        return float(self.comm.rank)

    @property
    def context(self) -> Any:
        """That of the replica."""
        return self.tf.distribute.get_replica_context()


Fact = Callable[[Worker], Any]


def in_a_graph(of: Worker, fact: Fact) -> Any:
    def traced() -> Any:
        return fact(of)

    return of.tf.function(traced)()


def in_a_replica(of: Worker, fact: Fact) -> Any:
    return of.strategy.run(fact, args=(of,))


def in_a_replica_of_a_graph(of: Worker, fact: Fact) -> Any:
    def traced() -> Any:
        return of.strategy.run(fact, args=(of,))

    return of.tf.function(traced)()


def plainly(of: Worker, fact: Fact) -> Any:
    return fact(of)


Way = Callable[[Worker, Fact], Any]
REPLICAS = (in_a_replica, in_a_replica_of_a_graph)
#: By name and way, what ranks 0 and 1 get.
FACTS: dict[tuple[str, Way], tuple[Fact, list[Any]]] = {}


def gives(*expected: Any, ways: tuple[Way, ...] = (plainly,)) -> Callable[[Fact], Fact]:
    """Notes what a function returns on each rank, or on both of them."""

    def noted(fact: Fact) -> Fact:
        for way in ways:
            FACTS[fact.__name__, way] = fact, [*expected] * (2 // len(expected))
        return fact

    return noted


def uneven(of: Worker) -> Any:
    """0 on rank 0, and 0 and 1 on rank 1."""
    return of.tf.range(of.comm.rank + 1, dtype=of.tf.float32)


def columns(of: Worker) -> Any:
    """Rank 0 has one column, and rank 1 two."""
    return of.tf.fill([1, of.comm.rank + 1], of.number)


def add_up(strategy: Any, value: Any) -> Any:
    return strategy.extended.reduce_to("SUM", value, value)


@gives(1.0)
def sum_over_a_dimension(of: Worker) -> Any:
    return of.strategy.reduce("SUM", of.strategy.run(uneven, args=(of,)), axis=0)


@gives(THIRD, ways=(plainly, in_a_graph))
def mean_over_a_dimension(of: Worker) -> Any:
    return of.strategy.reduce("MEAN", of.strategy.run(uneven, args=(of,)), axis=0)


@gives(0.5)
def mean_of_scalars_over_a_dimension(of: Worker) -> Any:
    return of.strategy.reduce("MEAN", of.strategy.run(lambda: of.number), axis=0)


@gives({"a": 1.0, "b": (2, [2.0, 2.0])})
def sum_of_a_nest(of: Worker) -> Any:
    nest = {"a": of.number, "b": (1, of.tf.ones([2]))}
    return of.strategy.reduce("SUM", nest, axis=None)


@gives(0.5)
def mean_of_integers(of: Worker) -> Any:
    return of.strategy.reduce("MEAN", of.tf.constant(of.comm.rank), axis=None)


@gives([[0.0, 1.0, 1.0]])
def gather(of: Worker) -> Any:
    return of.strategy.gather(columns(of), axis=1)


@gives([[[0.0], [1.0, 2.0]], [], [[1.0], [1.0, 2.0]], []])
def gather_of_ragged_rows(of: Worker) -> Any:
    rows = [[[float(of.comm.rank)], [1.0, 2.0]], []]
    own = of.tf.ragged.constant(rows, ragged_rank=2)
    return of.strategy.gather(own, axis=0).to_list()


@gives("/job:localhost/replica:0/task:0/device:CPU:0")
def device_of_a_reduction(of: Worker) -> Any:
    found = []

    def traced() -> None:
        found.append(of.strategy.extended.reduce_to("SUM", of.tf.constant(1.0), "/cpu:0").device)

    of.tf.function(traced).get_concrete_function()
    return found[0]


@gives([1.0, 2], ways=REPLICAS)
def sums_in_a_replica(of: Worker) -> Any:
    return of.context.all_reduce("SUM", [of.tf.constant(of.number), of.tf.constant(1)])


@gives({"x": 0.5}, ways=REPLICAS)
def means_in_a_replica(of: Worker) -> Any:
    mean = of.tf.distribute.ReduceOp.MEAN
    return of.context.all_reduce(mean, {"x": of.tf.constant(of.number)})


@gives(1.0, ways=REPLICAS)
def merge_call(of: Worker) -> Any:
    return of.context.merge_call(add_up, (of.tf.constant(of.number),))


@gives(0, 1, ways=REPLICAS)
def replica_id(of: Worker) -> Any:
    return of.context.replica_id_in_sync_group


@gives(([0.0, 1.0], 1.0))
def a_function_as_a_replica(of: Worker) -> Any:
    def step() -> Any:
        gathered = of.context.all_gather(of.tf.identity([of.number]), axis=0)
        return gathered, of.context.merge_call(add_up, (of.tf.identity(of.number),))

    return of.strategy.run(of.tf.function(step))


@gives(1.0)
def sum_in_a_conditional(of: Worker) -> Any:
    def conditional(flag: Any) -> Any:
        def reduced() -> Any:
            return of.context.all_reduce("SUM", of.tf.constant(of.number))

        return of.tf.cond(flag, reduced, lambda: of.tf.constant(-1.0))

    step = of.tf.function(lambda flag: of.strategy.run(conditional, (flag,)))
    return step(of.tf.constant(True))


@gives([3.0 for _ in DTYPES], ways=REPLICAS)
def sums_of_all_dtypes_by_one_call(of: Worker) -> Any:
    values = [of.tf.cast(of.tf.constant(of.comm.rank + 1), dtype) for dtype in DTYPES]
    totals = of.context.all_reduce("SUM", values)
    for total, dtype in zip(totals, DTYPES, strict=True):
        of.tf.debugging.assert_type(total, dtype)
    return [of.tf.cast(total, of.tf.float64) for total in totals]


@gives(8.5, ways=(in_a_replica_of_a_graph,))
def sums_in_a_loop_and_in_a_nested_function(of: Worker) -> Any:
    tf, context, x = of.tf, of.context, of.tf.constant(1.0)
    for _ in tf.range(3):
        x = context.all_reduce("SUM", x)
    nested = tf.function(lambda x: context.all_reduce("MEAN", x + of.number))
    return nested(x)


@gives([[0.0, 1.0, 1.0]], ways=REPLICAS)
def gathered_columns(of: Worker) -> Any:
    return of.context.all_gather(columns(of), 1)


@gives([[0.0, 1.0, 1.0]], ways=REPLICAS)
def gathered_columns_counted_from_the_end(of: Worker) -> Any:
    return of.context.all_gather(columns(of), -1)


@gives([[0.0, 1.0, 1.0]], ways=REPLICAS)
def gathered_columns_chosen_by_a_tensor(of: Worker) -> Any:
    return of.context.all_gather(columns(of), of.tf.constant(1))


@gives({"rows": [0.0, 1.0, 1.0], "numbers": ([0, 1],)}, ways=REPLICAS)
def gathered_nest(of: Worker) -> Any:
    nest = {"rows": columns(of)[0], "numbers": (of.tf.constant([of.comm.rank]),)}
    return of.context.all_gather(nest, 0)


@gives([[False, True, True]], ways=REPLICAS)
def gathered_bools(of: Worker) -> Any:
    return of.context.all_gather(columns(of) == 1.0, 1)


@gives([[0j, 1 + 1j, 1 + 1j]], ways=REPLICAS)
def gathered_complex_numbers(of: Worker) -> Any:
    return of.context.all_gather(of.tf.complex(columns(of), columns(of)), 1)


@gives([[0.0, 1.0, 1.0]], ways=REPLICAS)
def gathered_in_a_conditional(of: Worker) -> Any:
    own, context = columns(of), of.context
    return of.tf.cond(own[0, 0] < 2.0, lambda: context.all_gather(own, 1), lambda: own)


@gives([[0.0, 1.0, 1.0]], ways=REPLICAS)
def gathered_in_a_nested_function(of: Worker) -> Any:
    own, context = columns(of), of.context
    return of.tf.function(lambda: context.all_gather(own, 1))()


# The sum of both ranks' losses, with respect to a rank's own part.
@gives([4.0], [16.0, 24.0], ways=REPLICAS)
def gradient_of_gathered_rows(of: Worker) -> Any:
    x = of.tf.fill([of.comm.rank + 1], of.number + 1.0)
    with of.tf.GradientTape() as tape:
        tape.watch(x)
        rows = of.context.all_gather(x * x, 0)
        loss = of.tf.reduce_sum(rows * of.tf.constant([1.0, 2.0, 3.0]))
    return tape.gradient(loss, x)


# Variables are aggregated as they say.
@gives(3.5)
def a_variable_that_is_aggregated_on_write(of: Worker) -> Any:
    with of.strategy.scope():
        variable = of.tf.Variable(of.number, aggregation=of.tf.VariableAggregation.MEAN)

    def assign() -> None:
        variable.assign(of.tf.constant(of.number + 3))

    of.strategy.run(assign)
    return variable


@gives((2, 1.5))
def variables_that_get_plain_numbers(of: Worker) -> Any:
    aggregations = of.tf.VariableAggregation
    with of.strategy.scope():
        total = of.tf.Variable(0, trainable=False, aggregation=aggregations.SUM)
        mean = of.tf.Variable(1.0, aggregation=aggregations.MEAN)
        first = of.tf.Variable(0, aggregation=aggregations.ONLY_FIRST_REPLICA)

    def assign() -> None:
        total.assign_add(1)
        mean.assign_add(float(of.number))
        first.assign(7)

    of.strategy.run(assign)
    assert first.numpy() == 7
    return total.numpy(), mean.numpy()


@gives(3.0)
def a_variable_that_is_aggregated_on_read(of: Worker) -> Any:
    with of.strategy.scope():
        variable = of.tf.Variable(
            of.number + 1,
            synchronization=of.tf.VariableSynchronization.ON_READ,
            aggregation=of.tf.VariableAggregation.SUM,
        )
    of.strategy.run(lambda: variable.assign(of.number + 1))
    return variable


# Values and datasets from functions are each worker's own.
@gives(((0, 2),), ((1, 2),))
def values_from_a_function(of: Worker) -> Any:
    values = of.strategy.experimental_distribute_values_from_function(
        lambda context: (context.replica_id_in_sync_group, context.num_replicas_in_sync)
    )
    return of.strategy.experimental_local_results(values)


@gives([0, 1], [10, 11])
def datasets_from_a_function(of: Worker) -> Any:
    datasets = of.strategy.distribute_datasets_from_function(
        lambda context: of.tf.data.Dataset.range(2).map(
            lambda i: i + 10 * context.input_pipeline_id
        )
    )
    return [int(of.strategy.experimental_local_results(x)[0]) for x in datasets]


@gives((0.0,), (1.0,))
def local_results(of: Worker) -> Any:
    return of.strategy.experimental_local_results(of.strategy.run(lambda: of.number))


# The strategy presents itself as one of several workers.
@gives(("worker", 0), ("worker", 1))
def task(of: Worker) -> Any:
    return of.strategy.cluster_resolver.task_type, of.strategy.cluster_resolver.task_id


@gives(True)
def is_a_strategy_of_several_workers(of: Worker) -> Any:
    return isinstance(of.strategy, of.tf.distribute.MultiWorkerMirroredStrategy)


@gives(True)
def is_in_multi_worker_mode(of: Worker) -> Any:
    return of.strategy.extended._in_multi_worker_mode()


@gives(True)
def is_copied_as_itself(of: Worker) -> Any:
    return copy.deepcopy(of.strategy) is of.strategy


@gives(True)
def scope_has_its_communicator(of: Worker) -> Any:
    from gradring.tensorflow.graph.ops import current_communicator

    with of.strategy.scope():
        return current_communicator() is of.comm


@gives(True, False)
def only_the_chief_checkpoints(of: Worker) -> Any:
    return of.strategy.extended.should_checkpoint


def reduced_in_a_graph_of_tensorflow_1(of: Worker) -> None:
    with of.tf.Graph().as_default():
        of.strategy.reduce("SUM", of.tf.constant(of.number), axis=None)


#: What cannot be reduced or gathered, and words of the error.
REFUSED: dict[str, tuple[Fact, tuple[str, ...]]] = {
    "bool": (
        lambda of: of.strategy.reduce("SUM", of.tf.constant(True), axis=None),
        ("bool cannot be reduced; cast it to one of float32",),
    ),
    "text": (
        lambda of: of.strategy.gather(of.tf.constant(["text"]), axis=0),
        ("string has no fixed width",),
    ),
    "axis": (lambda of: of.strategy.gather(of.tf.ones([2]), axis=1), ("axis=1", "(2,)")),
    "scalar": (lambda of: of.strategy.gather(of.tf.constant(1.0), axis=0), ("axis=0", "()")),
    "rows": (
        lambda of: of.strategy.gather(of.tf.ragged.constant([[1.0]]), axis=1),
        ("gather", "RaggedTensor"),
    ),
    "graph of TensorFlow 1": (reduced_in_a_graph_of_tensorflow_1, ("inside tf.function",)),
}


def all_facts() -> Any:
    import tensorflow as tf

    from gradring.tensorflow import CustomCollectiveStrategy

    with join() as comm:
        of = Worker(tf, CustomCollectiveStrategy(communicator=comm), comm)
        found: dict[Any, Any] = {
            (name, way.__name__): tf.nest.map_structure(
                lambda v: v.numpy().tolist() if hasattr(v, "numpy") else v, way(of, fact)
            )
            for (name, way), (fact, _) in FACTS.items()
        }
        for name, (call, _) in REFUSED.items():
            with pytest.raises((TypeError, ValueError, NotImplementedError)) as raised:
                call(of)
            found[name] = str(raised.value)
    return found


@pytest.fixture(scope="module")
def ranks() -> Any:
    return run_ranks(all_facts, 2)


@pytest.mark.parametrize(
    ("name", "way"), FACTS, ids=lambda it: it if isinstance(it, str) else it.__name__
)
def test_ranks_get_what_a_strategy_of_tensorflow_gives(ranks: Ranks, name: str, way: Way) -> None:
    assert [result[name, way.__name__] for result in ranks] == FACTS[name, way][1]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_reduced_or_gathered_is_refused_in_words(ranks: Ranks, name: str) -> None:
    for result in ranks:
        assert all(word in result[name] for word in REFUSED[name][1]), result[name]


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
