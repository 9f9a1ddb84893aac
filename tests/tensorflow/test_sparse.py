"""Embedding gradients against the reduction of the dense table."""

import itertools
import logging
from typing import Any

import numpy as np
import pytest
from tf_worker import join

from gradring.testing import run_ranks

ROWS, WIDTH = 40, 3

#: Indices on rank 0 and rank 1; 40 rows travel as a table from about 68 rows on.
CASES: dict[str, tuple[list[int], list[int]]] = {
    "disjoint": ([1, 2], [30, 31, 39]),
    "shared": ([1, 2, 3], [3, 2, 0]),
    "duplicates": ([5, 5, 5, 6], [6, 5]),
    "one rank empty": ([], [7, 7]),
    "all ranks empty": ([], []),
    "every row": (list(range(40)), list(range(39, -1, -1))),
}


def slices(tf: Any, rank: int, case: str, index_dtype: str, dtype: str = "float32") -> Any:
    indices = np.array(CASES[case][rank], index_dtype)
    values = np.arange(indices.size * WIDTH).reshape(-1, WIDTH) + 100 * rank
    return tf.IndexedSlices(
        tf.cast(tf.constant(values), dtype), tf.constant(indices), tf.constant([ROWS, WIDTH])
    )


def worker() -> Any:
    import tensorflow as tf

    from gradring.tensorflow import CustomCollectiveStrategy, all_reduce

    with join() as comm:
        strategy = CustomCollectiveStrategy(communicator=comm)

        @tf.function  # type: ignore[untyped-decorator]
        def in_graph(values: Any, indices: Any, op: str) -> Any:
            shape = tf.constant([ROWS, WIDTH])
            return all_reduce(tf.IndexedSlices(values, indices, shape), op, "e", comm)

        def eager(values: Any, indices: Any, op: str) -> Any:
            shape = tf.constant([ROWS, WIDTH])
            return all_reduce(tf.IndexedSlices(values, indices, shape), op, "e", comm)

        found: dict[Any, Any] = {}
        for case in CASES:
            for index_dtype in ("int32", "int64"):
                own = slices(tf, comm.rank, case, index_dtype)
                for op in ("sum", "mean"):
                    for mode, reduce in (("eager", eager), ("graph", in_graph)):
                        result = reduce(own.values, own.indices, op)
                        found[case, index_dtype, op, mode] = report(tf, result)
        unknown = tf.IndexedSlices(*slice_parts(slices(tf, comm.rank, "every row", "int32")))
        found["unknown size"] = int(all_reduce(unknown, "sum", "u", comm).indices.shape[0])
        half = slices(tf, comm.rank, "shared", "int32", "bfloat16")
        mixed = all_reduce([half, tf.ones([2]), unknown], "sum", "m", comm)
        found["mixed"] = tf.cast(tf.convert_to_tensor(mixed[0]), tf.float32).numpy()
        with strategy.scope():
            table = tf.Variable(tf.zeros([ROWS, WIDTH]), name="table")
        own = slices(tf, comm.rank, "shared", "int64")
        (reduced,) = strategy.extended.batch_reduce_to("MEAN", [(own, table)])
        found["strategy"] = report(tf, reduced)
        found["announced"] = announced(tf, in_graph, slices(tf, comm.rank, "every row", "int64"))
        return found


def slice_parts(value: Any) -> tuple[Any, Any]:
    return value.values, value.indices


def report(tf: Any, result: Any) -> Any:
    return {
        "dense": tf.convert_to_tensor(result).numpy(),
        "indices": result.indices.numpy().tolist(),
        "dtype": result.indices.dtype.name,
    }


def announced(tf: Any, reduce: Any, own: Any) -> list[str]:
    """What is logged when a table that counts as large becomes dense, three times."""
    from gradring.tensorflow import sparse

    sparse.ANNOUNCED_BYTES = 100
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gradring").addHandler(handler)
    for op in ("sum", "mean", "sum"):
        tf.function(reduce.python_function)(own.values, own.indices, op)
    return messages


def oracle(case: str, op: str) -> Any:
    table = np.zeros((ROWS, WIDTH), np.float32)
    for rank, indices in enumerate(CASES[case]):
        values = np.arange(len(indices) * WIDTH).reshape(-1, WIDTH) + 100 * rank
        np.add.at(table, np.array(indices, np.int64), values.astype(np.float32))
    return table / 2 if op == "mean" else table


@pytest.fixture(scope="module")
def ranks() -> Any:
    return run_ranks(worker, 2)


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
@pytest.mark.parametrize("case", CASES)
def test_slices_are_reduced_as_the_table_would_be(
    ranks: Any, case: str, index_dtype: str, op: str, mode: str
) -> None:
    for result in ranks:
        found = result[case, index_dtype, op, mode]
        np.testing.assert_array_equal(found["dense"], oracle(case, op))
        assert found["dtype"] == index_dtype
        expected = set(CASES[case][0]) | set(CASES[case][1])
        assert len(found["indices"]) == len(expected), "one row for each index"
        assert set(found["indices"]) == expected


def test_a_table_of_unknown_size_travels_as_rows(ranks: Any) -> None:
    assert [result["unknown size"] for result in ranks] == [ROWS] * 2


def test_sixteen_bit_slices_travel_among_dense_gradients(ranks: Any) -> None:
    for result in ranks:
        np.testing.assert_array_equal(result["mixed"], oracle("shared", "sum"))


def test_a_strategy_reduces_slices_for_a_variable(ranks: Any) -> None:
    for result in ranks:
        np.testing.assert_array_equal(result["strategy"]["dense"], oracle("shared", "mean"))


def test_a_large_table_that_becomes_dense_is_announced_once_by_name(ranks: Any) -> None:
    for result in ranks:
        (message,) = result["announced"]
        assert message.startswith("'e': so many of its 40 rows have gradients")


DTYPES = [
    *("float32", "float64", "float16", "bfloat16"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"),
]
OPS = ("sum", "mean")

#: Index of each row on ranks 0, 1 and 2: shared, twice on one rank, on one rank only.
TOUCHED = ([3, 1, 1, 2], [1, 3, 2, 3], [3, 0, 1, 2])
WAYS = {"rows": [1000, 64], "unknown size": None, "table": [4, 64]}


def contribution(tf: Any, rank: int, dtype: str) -> tuple[Any, Any]:
    """A rank's rows, and their table: sums round and wrap, and over ranks exceed float16."""
    own = tf.dtypes.as_dtype(dtype)
    rng, shape = np.random.default_rng(rank), (len(TOUCHED[rank]), 64)
    if own.is_floating:
        wide = np.float64 if dtype == "float64" else np.float32
        rows = rng.uniform(-3e4, 3e4, shape).astype(own.as_numpy_dtype)
    else:
        wide = own.as_numpy_dtype
        rows = rng.integers(own.min, own.max, shape, wide, endpoint=True)
    table = np.zeros((4, 64), wide)
    np.add.at(table, TOUCHED[rank], rows.astype(wide))
    return rows, table.astype(own.as_numpy_dtype)


def three_ways() -> Any:
    """The bits of the same reductions, as slices and as a dense tensor."""
    import tensorflow as tf

    from gradring.tensorflow import all_reduce

    # Rows are added in the order of ranks; so must the others be, to have the same bits.
    with join(reproducible=True) as comm:

        def eager(rows: Any, table: Any, op: str) -> Any:
            indices = tf.constant(TOUCHED[comm.rank])
            shapes = [shape and tf.constant(shape) for shape in WAYS.values()]
            slices = [tf.IndexedSlices(rows, indices, shape) for shape in shapes]
            return all_reduce([*slices, table], op, "e", comm)

        modes = {"eager": eager, "graph": tf.function(eager)}
        found: dict[Any, Any] = {}
        for dtype, op, mode in itertools.product(DTYPES, OPS, modes):
            rows, table = map(tf.constant, contribution(tf, comm.rank, dtype))
            *slices, dense = modes[mode](rows, table, op)
            bits = {"dense": (dense.dtype.name, dense.numpy().tobytes())}
            for way, result in zip(WAYS, slices, strict=True):
                order = result.indices.numpy().tolist()
                assert order == ([0, 1, 2, 3] if way == "table" else [3, 1, 2, 0]), "what travelled"
                values = result.values.numpy()[np.argsort(order)]
                bits[way] = (result.values.dtype.name, values.tobytes())
            found[dtype, op, mode] = bits
        return found


@pytest.fixture(scope="module")
def three_ranks() -> Any:
    return run_ranks(three_ways, 3)


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_slices_have_the_bits_of_the_dense_tensor_however_they_travel(
    three_ranks: Any, dtype: str, op: str, mode: str
) -> None:
    expected = three_ranks[0][dtype, op, mode]["dense"]
    assert expected[0] == dtype
    for result in three_ranks:
        assert result[dtype, op, mode] == dict.fromkeys(("dense", *WAYS), expected)


def test_what_travels_is_what_moves_fewer_bytes() -> None:
    from gradring.tensorflow.sparse import travels_dense

    # A table of 1000 rows of 400 bytes: 800 kB as a table, 408 bytes for each row.
    assert not travels_dense(1960, 400, 8, 1000)
    assert travels_dense(1961, 400, 8, 1000)
    # 10 GB with 10,000 rows touched stay sparse.
    assert not travels_dense(10_000, 1024, 8, 10_000_000)
