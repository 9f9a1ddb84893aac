"""Embedding gradients against the reduction of the dense table."""

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


def test_what_travels_is_what_moves_fewer_bytes() -> None:
    from gradring.tensorflow.sparse import travels_dense

    # A table of 1000 rows of 400 bytes: 800 kB as a table, 408 bytes for each row.
    assert not travels_dense(1960, 400, 8, 1000)
    assert travels_dense(1961, 400, 8, 1000)
    # 10 GB with 10,000 rows touched stay sparse.
    assert not travels_dense(10_000, 1024, 8, 10_000_000)
