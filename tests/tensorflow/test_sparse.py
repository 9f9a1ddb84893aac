"""Sums of embedding gradients against the reduction of the dense table."""

import collections
import itertools
from typing import Any

import numpy as np
import pytest

from gradring.testing import run_ranks
from support.chosen import chosen, marked
from support.keras_models import CAN_FIT, needs_fit
from support.log_lines import kept_lines
from support.tf_worker import join

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
Way = tuple[str, str, str, str]
#: Cases, dtypes of indices, reductions, and whether in a graph.
SLICES: list[Way] = list(
    itertools.product(CASES, ("int32", "int64"), ("sum", "mean"), ("eager", "graph"))
)
#: In every run of the tests: all that is not traced, and graphs of rows, of none and of a table.
QUICK_SLICES = (
    *(way for way in SLICES if "eager" in way),
    ("duplicates", "int32", "sum", "graph"),
    ("one rank empty", "int64", "mean", "graph"),
    ("every row", "int64", "sum", "graph"),
)


def slices(tf: Any, rank: int, case: str, index_dtype: str, dtype: str = "float32") -> Any:
    indices = np.array(CASES[case][rank], index_dtype)
    values = np.arange(indices.size * WIDTH).reshape(-1, WIDTH) + 100 * rank
    return tf.IndexedSlices(
        tf.cast(tf.constant(values), dtype), tf.constant(indices), tf.constant([ROWS, WIDTH])
    )


def worker(ways: list[Way]) -> Any:
    import tensorflow as tf

    from gradring.tensorflow import CustomCollectiveStrategy, all_reduce

    with join() as comm:
        strategy = CustomCollectiveStrategy(communicator=comm, embeddings="sum")

        def eager(values: Any, indices: Any, op: str) -> Any:
            shape = tf.constant([ROWS, WIDTH])
            slices = tf.IndexedSlices(values, indices, shape)
            return all_reduce(slices, op, "e", comm, embeddings="sum")

        modes = {"eager": eager, "graph": tf.function(eager)}
        found: dict[Any, Any] = {}
        for case, index_dtype, op, mode in ways:
            own = slices(tf, comm.rank, case, index_dtype)
            result = modes[mode](own.values, own.indices, op)
            found[case, index_dtype, op, mode] = report(tf, result)
        every = slices(tf, comm.rank, "every row", "int64")
        unknown = tf.IndexedSlices(every.values, tf.cast(every.indices, tf.int32))
        found["unknown size"] = int(
            all_reduce(unknown, "sum", "u", comm, embeddings="sum").indices.shape[0]
        )
        half = slices(tf, comm.rank, "shared", "int32", "bfloat16")
        mixed = all_reduce([half, tf.ones([2]), unknown], "sum", "m", comm, embeddings="sum")
        found["mixed"] = tf.cast(tf.convert_to_tensor(mixed[0]), tf.float32).numpy()
        with strategy.scope():
            table = tf.Variable(tf.zeros([ROWS, WIDTH]), name="table")
        own = slices(tf, comm.rank, "shared", "int64")
        (reduced,) = strategy.extended.batch_reduce_to("MEAN", [(own, table)])
        found["strategy"] = report(tf, reduced)
        found["announced"] = announced(tf, eager, every)
        return found


def report(tf: Any, result: Any) -> Any:
    return {
        "dense": tf.convert_to_tensor(result).numpy(),
        "indices": result.indices.numpy().tolist(),
        "dtype": result.indices.dtype.name,
    }


def announced(tf: Any, reduce: Any, own: Any) -> list[str]:
    """What is logged when a table that counts as large becomes dense, four times."""
    from gradring.tensorflow.graph import sparse

    sparse.ANNOUNCED_BYTES = 100
    messages = kept_lines()
    for op in ("sum", "mean", "sum"):
        tf.function(reduce)(own.values, own.indices, op)
    reduce(own.values, own.indices, "sum")
    return messages


def oracle(case: str, op: str) -> Any:
    table = np.zeros((ROWS, WIDTH), np.float32)
    for rank, indices in enumerate(CASES[case]):
        values = np.arange(len(indices) * WIDTH).reshape(-1, WIDTH) + 100 * rank
        np.add.at(table, np.array(indices, np.int64), values.astype(np.float32))
    return table / 2 if op == "mean" else table


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Any:
    return run_ranks(worker, 2, chosen(request, "way"), timeout=280)


@pytest.mark.parametrize("way", marked(SLICES, QUICK_SLICES), ids="-".join)
def test_slices_are_reduced_as_the_table_would_be(ranks: Any, way: Way) -> None:
    case, index_dtype, op, _ = way
    for result in ranks:
        found = result[way]
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
Bits = tuple[str, str, str]
#: Dtypes, reductions, and ways to run them.
BITS: list[Bits] = list(itertools.product(DTYPES, OPS, ("eager", "graph")))
#: In every run of the tests: all dtypes, and the graph of one that adds in a wider one.
QUICK_BITS = (
    *((dtype, "sum", "eager") for dtype in DTYPES),
    *(("float16", "mean", "eager"), ("int8", "mean", "eager"), ("bfloat16", "sum", "graph")),
)

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


#: What one collective more costs, in bytes, so that owners always pay; and so that they never do.
ALWAYS, NEVER = -(1 << 40), 1 << 40


def let_owners_pay(message_bytes: int) -> None:
    from gradring.tensorflow.graph import sparse

    sparse.MESSAGE_BYTES, sparse.OWNER_BYTES = ALWAYS, 0
    sparse._message_bytes = lambda communicator: message_bytes


def three_ways(cases: list[Bits], fits: list[bool]) -> Any:
    """The bits of the same reductions, as slices and as a dense tensor; and what else three do."""
    import tensorflow as tf

    from gradring.tensorflow import all_reduce
    from gradring.tensorflow.graph import sparse

    usual = sparse.MESSAGE_BYTES, sparse.OWNER_BYTES

    # Rows are added in the order of ranks; so must the others be, to have the same bits.
    with join(reproducible=True) as comm:

        def eager(rows: Any, table: Any, op: str) -> Any:
            indices = tf.constant(TOUCHED[comm.rank])
            shapes = [shape and tf.constant(shape) for shape in WAYS.values()]
            slices = [tf.IndexedSlices(rows, indices, shape) for shape in shapes]
            return all_reduce([*slices, table], op, "e", comm, embeddings="sum")

        def by_owners(rows: Any, op: str) -> Any:
            slices = tf.IndexedSlices(rows, tf.constant(TOUCHED[comm.rank]))
            return all_reduce(slices, op, "e", comm, embeddings="sum")

        modes = {"eager": eager, "graph": tf.function(eager)}
        found: dict[Any, Any] = {}
        for dtype, op, mode in cases:
            rows, table = map(tf.constant, contribution(tf, comm.rank, dtype))
            *slices, dense = modes[mode](rows, table, op)
            bits = {"dense": (dense.dtype.name, dense.numpy().tobytes())}
            for way, result in zip(WAYS, slices, strict=True):
                order = result.indices.numpy().tolist()
                assert order == ([0, 1, 2, 3] if way == "table" else [3, 1, 2, 0]), "what travelled"
                values = result.values.numpy()[np.argsort(order)]
                bits[way] = (result.values.dtype.name, values.tobytes())
            found[dtype, op, mode] = bits
        let_owners_pay(ALWAYS)
        for dtype, op in itertools.product(DTYPES, OPS):
            rows, _ = contribution(tf, comm.rank, dtype)
            # One dtype in a graph: tracing takes long.
            reduce = tf.function(by_owners) if dtype == "float16" else by_owners
            result = reduce(tf.constant(rows), op)
            values = result.values.numpy()[np.argsort(result.indices)]
            found["owners", dtype, op] = (result.values.dtype.name, values.tobytes())
        found["sent to owners"] = all_to_alls(comm)
        found["of one order"] = []
        for message_bytes in (ALWAYS, NEVER):
            let_owners_pay(message_bytes)
            orders = [by_owners(tf.constant(rows), "sum").indices.numpy().tolist()]
            found["of one order"] += orders
        let_owners_pay(ALWAYS)
        found["lengths"] = [lengths(tf, comm, *case) for case in LENGTHS]
        found["gradient"] = gradient(tf, comm)
        sparse.MESSAGE_BYTES, sparse.OWNER_BYTES = usual
        sparse._message_bytes = lambda communicator: sparse.MESSAGE_BYTES
        found["travelled"] = {case: travelled(tf, comm, case) for case in TRAVEL}
        if CAN_FIT:
            found["fit"] = {scaled: fitted(comm, scaled) for scaled in fits}
        let_owners_pay(ALWAYS)
        found["width"] = failure_of_widths(tf, comm)
        return found


def all_to_alls(comm: Any) -> int:
    """How many there were so far."""
    kinds = comm.stats()["collectives"]
    return kinds["all_to_all"]["count"] if "all_to_all" in kinds else 0


#: Of ranks 0, 1 and 2, how many rows each has; they share the first ones.
LENGTHS = [(0, 0, 0), (0, 5, 0), (7, 0, 7), (1, 2, 300)]


def lengths(tf: Any, comm: Any, *rows: int) -> bool:
    """Whether owners add up what ranks with so many rows have."""
    from gradring.tensorflow import all_reduce

    own = tf.IndexedSlices(tf.ones([rows[comm.rank], 2]), tf.range(rows[comm.rank]))
    result = all_reduce(own, "sum", "lengths", comm, embeddings="sum")
    expected = [[sum(index < count for count in rows)] * 2 for index in range(max(rows))]
    sums = result.values.numpy()[np.argsort(result.indices)]
    return bool(sums.tolist() == expected)


def gradient(tf: Any, comm: Any) -> list[Any]:
    """Of what comes of slices, with respect to their values: eagerly and in a graph."""
    from gradring.tensorflow import all_reduce

    def step(values: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(values)
            slices = tf.IndexedSlices(values, tf.constant(TOUCHED[comm.rank]))
            result = all_reduce(slices, "sum", "g", comm, embeddings="sum")
            weights = tf.cast(result.indices + 1, tf.float32)[:, tf.newaxis]
            loss = tf.reduce_sum(weights * result.values**2)
        return tape.gradient(loss, values)

    return [mode(tf.ones([4, 1])).numpy()[:, 0].tolist() for mode in (step, tf.function(step))]


#: How many rows of 4 KiB all ranks share, and how many each has for itself; and whether the rows
#: are to be sent to owners.
TRAVEL = {
    "shared": (200, 0, True),
    "some shared": (200, 40, True),
    "disjoint": (0, 200, False),
    "few": (3, 0, False),
}


def travelled(tf: Any, comm: Any, case: str) -> bool:
    """Whether rows were sent to owners."""
    from gradring.tensorflow import all_reduce

    shared, own, _ = TRAVEL[case]
    first = shared + comm.rank * own
    indices = tf.constant([*range(shared), *range(first, first + own)], tf.int64)
    slices = tf.IndexedSlices(tf.ones([shared + own, 1024]), indices, tf.constant([5000, 1024]))
    before = all_to_alls(comm)
    all_reduce(slices, "sum", case, comm, embeddings="sum")
    return all_to_alls(comm) > before


def fitted(comm: Any, scaled: bool) -> list[Any]:
    """Whether rows went to owners in `fit`, and the weights; owners asked or not."""
    import keras

    from gradring.tensorflow import CustomCollectiveStrategy

    words = np.random.default_rng(0).integers(0, 300, (60, 20))
    labels = np.random.default_rng(1).integers(0, 3, 60)
    found = []
    for message_bytes in (ALWAYS, NEVER):
        let_owners_pay(message_bytes)
        keras.utils.set_random_seed(1)
        with CustomCollectiveStrategy(communicator=comm, embeddings="sum").scope():
            model = keras.Sequential(
                [
                    keras.layers.Embedding(300, 16),
                    keras.layers.GlobalAveragePooling1D(),
                    keras.layers.Dense(3, activation="softmax"),
                ]
            )
            # The norm of all gradients depends on the order of the rows.
            optimizer = keras.optimizers.Adam(0.01, global_clipnorm=0.01)
            if scaled:
                optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
            model.compile(optimizer, "sparse_categorical_crossentropy")
        before = all_to_alls(comm)
        model.fit(words, labels, batch_size=30, verbose=0)
        weights = [weight.tobytes() for weight in model.get_weights()]
        found.append((all_to_alls(comm) > before, weights))
    return found


def failure_of_widths(tf: Any, comm: Any) -> str:
    """What is said of rows that are wider on rank 2."""
    from gradring.tensorflow import all_reduce

    try:
        slices = tf.IndexedSlices(tf.ones([4, 3 + comm.rank // 2]), tf.range(4))
        all_reduce(slices, "sum", "w", comm, embeddings="sum")
    except tf.errors.AbortedError as error:
        return str(error)
    return "nothing"


@pytest.fixture(scope="module")
def three_ranks(request: pytest.FixtureRequest) -> Any:
    cases = chosen(request, "bits"), chosen(request, "scaled")
    return run_ranks(three_ways, 3, *cases, timeout=280)


@pytest.mark.parametrize("bits", marked(BITS, QUICK_BITS), ids="-".join)
def test_slices_have_the_bits_of_the_dense_tensor_however_they_travel(
    three_ranks: Any, bits: Bits
) -> None:
    dtype, op, mode = bits
    expected = three_ranks[0][dtype, op, mode]["dense"]
    assert expected[0] == dtype
    for result in three_ranks:
        assert result[dtype, op, mode] == dict.fromkeys(("dense", *WAYS), expected)
        assert result["owners", dtype, op] == expected


def test_owners_were_asked_and_change_nothing_but_what_is_sent(three_ranks: Any) -> None:
    for result in three_ranks:
        assert result["sent to owners"] == len(OPS) * len(DTYPES)
        by_owners, gathered = result["of one order"]
        assert by_owners == gathered, "the order of rows, which counts for the norm of all"
        assert result["lengths"] == [True] * len(LENGTHS)


def test_gradients_flow_back_from_owners(three_ranks: Any) -> None:
    for rank, result in enumerate(three_ranks):
        sums = collections.Counter(itertools.chain(*TOUCHED))
        # Each of three losses depends on each rank's rows.
        expected = [3 * 2 * (index + 1) * sums[index] for index in TOUCHED[rank]]
        assert result["gradient"] == [expected] * 2


def test_rows_go_to_owners_where_ranks_share_enough_of_them(three_ranks: Any) -> None:
    for result in three_ranks:
        assert result["travelled"] == {case: expected for case, (*_, expected) in TRAVEL.items()}


@needs_fit
@pytest.mark.parametrize("scaled", marked((False, True), (False,)))
def test_fit_has_the_bits_of_gathered_rows(three_ranks: Any, scaled: bool) -> None:
    (_, expected), _ = three_ranks[0]["fit"][scaled]
    for result in three_ranks:
        assert result["fit"][scaled] == [(True, expected), (False, expected)]


def test_rows_of_another_width_are_told_by_name(three_ranks: Any) -> None:
    for result in three_ranks:
        assert "rank 2" in result["width"]
        assert "'w/to owners'" in result["width"]


def test_what_travels_is_what_moves_fewer_bytes() -> None:
    from gradring.tensorflow.graph.sparse import travels_dense

    # A table of 1000 rows of 400 bytes: 800 kB as a table, 408 bytes for each row.
    assert not travels_dense(1960, 1960, 400, 8, 1000)
    assert travels_dense(1961, 1961, 400, 8, 1000)
    # 10 GB with 10,000 rows touched stay sparse.
    assert not travels_dense(10_000, 10_000, 1024, 8, 10_000_000)
    # Four ranks have 2500 rows, of which owners move 1500.
    assert not travels_dense(2500, 1500, 400, 8, 1000)


def test_owners_pay_where_ranks_share_many_bytes_of_rows() -> None:
    from gradring.tensorflow.graph.sparse import moved_by_owners, owners_may_pay

    assert moved_by_owners(4000, 1000, 4) == 2000
    assert moved_by_owners(4000, 4000, 4) == 4000
    assert [moved_by_owners(2000, indices, 2) for indices in (1000, 2000)] == [2000, 2000]
    assert owners_may_pay(4000, 2000, 512)
    assert not owners_may_pay(4000, 4000, 512)
    assert not owners_may_pay(4000, 2000, 64), "finding them costs more than rows so narrow"
    assert not owners_may_pay(400, 200, 512), "one collective more costs more than so few"
