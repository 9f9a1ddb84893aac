"""Collectives on tensors, eagerly and in graphs, with two ranks."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gradring.testing import run_ranks
from support.chosen import chosen, marked
from support.tf_worker import join

Ranks = list[dict[Any, Any]]

FLOATS = ("float32", "float64", "float16", "bfloat16")
DTYPES = (*FLOATS, "int32", "int64", "uint8", "int8", "int16", "uint16", "uint32")
OPS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda a, b: a + b,
    "mean": lambda a, b: (a + b) / 2,
    "min": np.minimum,
    "max": np.maximum,
    "product": lambda a, b: a * b,
}
COUNTS = (0, 1, 7, 1000)
#: How many rows two ranks have.
ROWS = ((2, 2), (3, 1), (0, 4), (1, 0))
#: Some have more than others, or none.
QUICK = ROWS[1:3]


def contribution(rank: int, count: int) -> Any:
    """Small whole numbers, exact in every dtype also when multiplied; every element differs."""
    return 1 + (np.arange(count) * 2 + rank) % 10


def worker(rows: list[tuple[int, int]]) -> Any:
    import tensorflow as tf

    with join() as comm:
        return {
            "names": public_names(),
            **reductions(tf, comm),
            **structures(tf, comm),
            **gathers(tf, comm),
            **gradients_of_rows(tf, comm, rows),
            "second derivative of a broadcast": second_of_broadcast(tf, comm),
            **memory(tf, comm),
            **reducer(tf, comm),
        }


def reductions(tf: Any, comm: Any) -> Any:
    from gradring.tensorflow import all_reduce

    found = {}
    for op in OPS:
        inputs = {
            (dtype, count): tf.cast(tf.constant(contribution(comm.rank, count)), dtype)
            for dtype in DTYPES
            for count in COUNTS
        }

        def reduce(tensors: Any, op: str = op) -> Any:
            return all_reduce(tensors, op, f"grid/{op}", comm)

        found[op, "eager"] = as_float64(reduce(inputs))
        found[op, "graph"] = as_float64(tf.function(reduce)(inputs))
    return found


def as_float64(tensors: Any) -> Any:
    return {key: tensor.numpy().astype(np.float64) for key, tensor in tensors.items()}


def structures(tf: Any, comm: Any) -> Any:
    from gradring.tensorflow import all_reduce, broadcast_variables

    nest = all_reduce(
        {"a": 1.0, "b": [tf.constant([1, 2]), (tf.ones([2, 3, 1]),)]}, "sum", "n", comm
    )
    variables = [tf.Variable([comm.rank, 7]), tf.Variable(comm.rank == 1), tf.Variable(1.5)]
    broadcast_variables(variables, root=1, communicator=comm)
    for root in (-1, 2):
        with pytest.raises(ValueError, match=f"root={root} is not a rank of a world of 2"):
            broadcast_variables(variables, root=root, communicator=comm)
    with pytest.raises(ValueError, match="median"):
        all_reduce(tf.constant(1.0), "median", "x", comm)
    refused = no_tensors(tf, comm)
    accepted = all_reduce([variables[0], np.ones(2), 1.5, (2,)], "sum", "kinds", comm)
    broadcast_variables(variables[2], communicator=comm)
    return {
        "a nest": tf.nest.map_structure(lambda t: t.numpy().tolist(), nest),
        "the root's variables": [v.numpy().tolist() for v in variables],
        "refused": refused,
        "constants": [constant(tf, comm, dtype) for dtype in (tf.float32, tf.bfloat16)],
        "variables, arrays and numbers": tf.nest.map_structure(
            lambda t: t.numpy().tolist(), accepted
        ),
    }


def no_tensors(tf: Any, comm: Any) -> Any:
    """What each collective says of what cannot be sent, alone or beside what can."""
    from gradring.tensorflow import (
        GradientReducer,
        all_gather,
        all_reduce,
        broadcast,
        broadcast_variables,
    )

    before = comm.stats()["count"]
    calls: dict[str, Any] = {
        "all_reduce": lambda value: all_reduce([tf.ones([2]), value], "sum", "all_reduce", comm),
        "broadcast": lambda value: broadcast(value, 0, "broadcast", comm),
        "all_gather": lambda value: all_gather(value, "all_gather", comm),
        "gradients": lambda value: GradientReducer(communicator=comm)([tf.ones([2]), value]),
    }
    values = {
        "RaggedTensor": tf.ragged.constant([[1.0], [2.0, 3.0]]),
        "SparseTensor": tf.sparse.from_dense([[1.0, 0.0]]),
        "string": tf.constant(["text"]),
        "object": object(),
        "TensorArray": tf.TensorArray(tf.float32, 1),
        "MaskedArray": np.ma.array([1.0, 2.0], mask=[True, False]),
        "float8_e5m2": tf.cast([1.0], tf.dtypes.experimental.float8_e5m2),
    }
    said = {}
    for call, collective in calls.items():
        for kind, value in values.items():
            with pytest.raises(TypeError) as raised:
                collective(value)
            said[call, kind] = str(raised.value)
    with pytest.raises(TypeError) as raised:
        all_reduce([tf.ones([2]), None], "sum", "all_reduce", comm)
    said["all_reduce", "NoneType"] = str(raised.value)
    with pytest.raises(TypeError) as raised:
        broadcast_variables([tf.Variable(1.0), tf.ones([2])], communicator=comm)
    said["broadcast_variables", "Tensor"] = str(raised.value)
    assert comm.stats()["count"] == before, "something was sent before it was refused"
    return said


def constant(tf: Any, comm: Any, dtype: Any) -> Any:
    """What a communicator does with a tensor, which never changes: it may be anybody's."""
    x = tf.fill([3], tf.cast(1 + comm.rank, dtype))
    said = []
    for collective in (comm.all_reduce, comm.all_reduce_async, comm.broadcast):
        with pytest.raises(ValueError) as raised:
            collective(x)
        said.append(str(raised.value))
    return said, x.numpy().tolist(), comm.all_gather(x).tolist()


def gathers(tf: Any, comm: Any) -> Any:
    from gradring.tensorflow import all_gather, broadcast

    rows = tf.fill([comm.rank + 1, 2], float(comm.rank))
    return {
        "rows in rank order": all_gather(rows, "rows", comm).numpy().tolist(),
        "rows in a graph": tf.function(lambda t: all_gather(t, "rows", comm))(rows[1:])
        .numpy()
        .tolist(),
        "the root's": broadcast(tf.constant([comm.rank, 7], tf.uint16), root=1, communicator=comm)
        .numpy()
        .tolist(),
        "the root's in a graph": bool(
            tf.function(lambda t: broadcast(t, 1))(tf.constant(comm.rank > 0))
        ),
    }


def public_names() -> Any:
    """What a user sees who has written `import gradring`."""
    import gradring

    kind = gradring.tensorflow.callbacks.LiveLine.__name__
    return sorted(dir(gradring.tensorflow)), sorted(gradring.tensorflow.__all__), kind


def gradients_of_rows(tf: Any, comm: Any, rows: list[tuple[int, int]]) -> Any:
    """Through a gathering of rows of which ranks have as many as others, more, or none."""
    from gradring.tensorflow import all_gather

    def first(x: Any, weights: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(all_gather(x**3, "rows", comm) * weights)
        return tape.gradient(loss, x)

    def second(x: Any, weights: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(all_gather(first(x, weights), "again", comm) * weights)
        return tape.gradient(loss, x)

    found = {}
    for counts in rows:
        x, weights = rows_of(counts, comm.rank), (comm.rank + 1.0) * weights_of(counts)
        for dtype in ("float32", "complex64"):
            arguments = tf.cast(x, dtype), tf.cast(weights, dtype)
            unknown = [tf.TensorSpec([None, 2], dtype)] * 2
            for call in (first, second):
                graph = tf.function(call, input_signature=unknown)
                for mode, either in (("eager", call), ("graph", graph)):
                    key = ("rows", counts, dtype, call.__name__, mode)
                    found[key] = either(*arguments).numpy()
    return found


def second_of_broadcast(tf: Any, comm: Any) -> Any:
    """A second derivative, in a branch of a graph."""
    from gradring.tensorflow import broadcast

    @tf.function  # type: ignore[untyped-decorator]
    def second(x: Any) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                sent = tf.cond(x[0] > 0, lambda: broadcast(x**3, 1, "root's", comm), lambda: x)
            first = inner.gradient(sent, x)
        return outer.gradient(first, x)

    return second(tf.constant([1.0, 2.0])).numpy().tolist()


def rows_of(counts: tuple[int, ...], rank: int) -> Any:
    """A rank's rows; every element differs."""
    return np.arange(2 * counts[rank], dtype=np.float32).reshape(-1, 2) + 10 * rank + 1


def weights_of(counts: tuple[int, ...]) -> Any:
    """Of all gathered elements."""
    return np.arange(2 * sum(counts), dtype=np.float32).reshape(-1, 2) / 8


def memory(tf: Any, comm: Any) -> Any:
    """How often tensors are copied when only the reduction reads them."""
    from gradring import _native
    from gradring.tensorflow import all_reduce, measure_overlap

    @tf.function  # type: ignore[untyped-decorator]
    def step(x: Any) -> Any:
        made_here = [x * float(i) for i in range(2, 7)]
        return all_reduce(made_here, "sum", "made", comm, bucket_bytes=4096)

    x = tf.ones([1024])
    graph = step.get_concrete_function(x).graph
    step(x)
    before = _native.tensorflow_counters()
    stats_before = comm.stats()
    with measure_overlap(comm) as overlap:
        [tensor.numpy() for tensor in step(x)]
        comm.all_reduce(np.ones(1024, np.float32))  # the program stands still for this one
    after, stats = _native.tensorflow_counters(), comm.stats()
    times = ("moving_s", "waiting_s", "exposed_s")
    return {
        "overlap": overlap,
        "times": tuple(stats[time] - stats_before[time] for time in times),
        "counted": {key: after[key] - before[key] for key in after},
        "start order": [
            op.get_attr("label").decode()
            for op in graph.get_operations()
            if op.type == "GradringStart"
        ],
    }


def reducer(tf: Any, comm: Any) -> Any:
    """Data-parallel training without a strategy."""
    from gradring.tensorflow import GradientReducer, broadcast_variables

    weights = [tf.Variable(tf.fill([2, 1], comm.rank + 1.0)), tf.Variable([0.5])]
    broadcast_variables(weights, communicator=comm)
    unused = tf.Variable(1.0)
    reduce_gradients = GradientReducer(communicator=comm)

    @tf.function  # type: ignore[untyped-decorator]
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ weights[0] + weights[1] - y) ** 2)
        grads = reduce_gradients(tape.gradient(loss, [*weights, unused]))
        for weight, grad in zip(weights, grads, strict=False):
            weight.assign_sub(0.1 * grad)
        return grads[2] is None

    x, y = batch()
    half = slice(comm.rank * 4, comm.rank * 4 + 4)
    for _ in range(5):
        kept_none = step(tf.constant(x[half]), tf.constant(y[half]))
    return {"reducer": [w.numpy() for w in weights], "none stays none": bool(kept_none)}


def batch() -> Any:
    x = np.linspace(-1, 1, 16, dtype=np.float32).reshape(8, 2)
    return x, (x.sum(axis=1, keepdims=True) * 3 + 1).astype(np.float32)


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Any:
    return run_ranks(worker, 2, chosen(request, "counts"))


def test_modules_of_the_package_are_no_public_names(ranks: Ranks) -> None:
    shown, public, kind = ranks[0]["names"]
    assert shown == public and {"all_gather", "broadcast", "callbacks"} < set(public)
    assert kind == "LiveLine"


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("op", OPS)
def test_every_dtype_and_count_is_reduced_exactly(ranks: Ranks, op: str, mode: str) -> None:
    for result in ranks:
        for (dtype, count), reduced in result[op, mode].items():
            expected = OPS[op](contribution(0, count).astype(float), contribution(1, count))
            if op == "mean" and dtype not in FLOATS:
                expected = np.trunc(expected)
            np.testing.assert_array_equal(reduced, expected, err_msg=f"{dtype}[{count}]")


#: By what is sent, what each rank gets.
EACH_GETS: dict[str, list[Any]] = {
    "a nest": [{"a": 2.0, "b": [[2, 4], ([[[2.0]] * 3] * 2,)]}] * 2,
    "variables, arrays and numbers": [[[2, 14], [2.0, 2.0], 3.0, (4,)]] * 2,
    "the root's variables": [[[1, 7], True, 1.5]] * 2,
    "the root's": [[1, 7]] * 2,
    "the root's in a graph": [True] * 2,
    # The root's, for both ranks' losses.
    "second derivative of a broadcast": [[0.0, 0.0], [12.0, 24.0]],
    "rows in rank order": [[[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]] * 2,
    "rows in a graph": [[[1.0, 1.0]]] * 2,
}


@pytest.mark.parametrize("what", EACH_GETS)
def test_each_rank_gets_what_is_due(ranks: Ranks, what: str) -> None:
    assert [result[what] for result in ranks] == EACH_GETS[what]


def test_what_is_no_tensor_is_refused_by_name_before_anything_is_sent(ranks: Ranks) -> None:
    for result in ranks:
        assert len(result["refused"]) == 30
        for (call, kind), message in result["refused"].items():
            assert message.startswith(f"{call}: ") and kind in message, message


def test_a_communicator_does_not_write_to_tensors_of_any_dtype(ranks: Ranks) -> None:
    """Buffers have no bfloat16, and TensorFlow's capsules cannot say that they are read-only."""
    for rank, result in enumerate(ranks):
        for said, own, gathered in result["constants"]:
            assert all("read-only" in text or "does not lend" in text for text in said), said
            assert own == [1.0 + rank] * 3 and gathered == [1.0] * 3 + [2.0] * 3


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
@pytest.mark.parametrize("counts", marked(ROWS, QUICK))
def test_gradients_go_back_to_the_ranks_that_had_the_rows(
    ranks: Ranks, counts: tuple[int, int], dtype: str, mode: str
) -> None:
    weights = 3 * weights_of(counts)  # of the losses of both ranks together
    own = np.split(weights, [counts[0]])
    for rank, result in enumerate(ranks):
        x = rows_of(counts, rank)
        first, second = (
            result["rows", counts, dtype, order, mode] for order in ("first", "second")
        )
        np.testing.assert_allclose(first, 3 * x**2 * own[rank], 1e-5)
        np.testing.assert_allclose(second, 6 * x * own[rank] ** 2, 1e-5)


def test_tensors_that_nobody_else_reads_are_reduced_in_place(ranks: Ranks) -> None:
    for result in ranks:
        counted = result["counted"]
        assert counted["forwarded_tensors"] == 5
        assert counted["copied_tensors"] == 0
        assert counted["starts"] == counted["waits"] == 5


def test_the_overlap_of_a_block_is_measured(ranks: Ranks) -> None:
    for result in ranks:
        overlap = result["overlap"]
        # Of those in the graph all may be over before somebody waits for them.
        assert overlap.collectives_s > 0 and overlap.exposed_s > 0
        found = (overlap.communication_s, overlap.waiting_s, overlap.exposed_s)
        assert found == result["times"]
        assert 0 <= overlap.hidden_share <= 1


def test_the_starts_of_a_call_are_numbered_in_their_order(ranks: Ranks) -> None:
    for result in ranks:
        assert result["start order"] == [f"made/{i}" for i in range(5)]


def test_a_reducer_without_strategy_trains_as_one_process_on_the_combined_batch(
    ranks: Ranks,
) -> None:
    x, y = batch()
    weight, bias = np.ones((2, 1), np.float32), np.float32(0.5)
    for _ in range(5):
        error = x @ weight + bias - y
        weight, bias = weight - 0.1 * 2 * x.T @ error / 8, bias - 0.1 * 2 * error.mean()
    for result in ranks:
        np.testing.assert_allclose(result["reducer"][0], weight, rtol=1e-5)
        np.testing.assert_allclose(result["reducer"][1], [bias], rtol=1e-5)
        assert result["none stays none"]
    for mine, theirs in zip(ranks[0]["reducer"], ranks[1]["reducer"], strict=True):
        assert mine.tobytes() == theirs.tobytes()
