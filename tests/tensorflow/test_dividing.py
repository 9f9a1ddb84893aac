"""Collectives that divide or pass on tensors, and their derivatives, against one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gradring.errors import MismatchError
from gradring.testing import run_ranks
from support.chosen import chosen, marked
from support.tf_worker import join

RANKS = 3
ROOT = 1
#: Of all ranks; the first dimension is divided unevenly, or evenly.
UNEVEN = np.sin(np.arange(RANKS * 5 * 2, dtype=np.float64)).reshape(RANKS, 5, 2)
EVEN = np.cos(np.arange(RANKS * 6 * 2, dtype=np.float64)).reshape(RANKS, 6, 2)
INPUTS = {
    "all_gather": UNEVEN,
    "all_to_all": EVEN,
    "all_to_all, splits": EVEN,
    "broadcast": UNEVEN,
    "mean, scattered": UNEVEN,
    "reduce_scatter": UNEVEN,
}
#: By the rank that sends: of its six rows, so many for each.
SPLITS = [[1, 2, 3], [0, 0, 6], [5, 1, 0]]
DERIVATIVES = ("result", "gradient", "second", "tangent")
CASES = [(name, way) for name in INPUTS for way in ("eager", "graph", "unknown length")]
#: Each collective, and each way.
QUICK = (
    ("all_gather", "graph"),
    ("all_to_all", "unknown length"),
    ("all_to_all, splits", "eager"),
    ("all_to_all, splits", "graph"),
    ("all_to_all, splits", "unknown length"),
    ("broadcast", "eager"),
    ("mean, scattered", "graph"),
    ("reduce_scatter", "unknown length"),
)


def collective(name: str, comm: Any, x: Any) -> Any:
    import tensorflow as tf

    from gradring import tensorflow as of

    if name == "broadcast":
        return of.broadcast(x, ROOT, name, comm)
    if name == "mean, scattered":
        return of.reduce_scatter(x, "mean", name, comm)
    if name == "all_to_all, splits":
        rows, counts = of.all_to_all(x, name, comm, splits=SPLITS[comm.rank])
        came = tf.constant([sent[comm.rank] for sent in SPLITS], tf.int64)
        tf.debugging.assert_equal(counts, came)
        return rows
    return getattr(of, name)(x, name=name, communicator=comm)


def together(tf: Any, name: str, inputs: list[Any]) -> list[Any]:
    """What the collective gives each rank, computed in one process."""
    parts = {rank: np.array_split(np.arange(len(inputs[0])), RANKS)[rank] for rank in range(RANKS)}
    if name == "all_gather":
        return [tf.concat(inputs, 0)] * RANKS
    if name == "all_to_all":
        return [tf.concat([tf.gather(x, parts[rank]) for x in inputs], 0) for rank in range(RANKS)]
    if name == "all_to_all, splits":
        sent = [tf.split(x, splits) for x, splits in zip(inputs, SPLITS, strict=True)]
        return [tf.concat([of_rank[rank] for of_rank in sent], 0) for rank in range(RANKS)]
    if name == "broadcast":
        return [inputs[ROOT]] * RANKS
    total = tf.add_n(inputs) / (RANKS if name.startswith("mean") else 1)
    return [tf.gather(total, parts[rank]) for rank in range(RANKS)]


def derivatives(tf: Any, run: Any, inputs: Any, rank: int) -> dict[str, Any]:
    """What follows from a program that is not linear around the collective.

    Args:
        tf: TensorFlow.
        run: Gives what the collective makes of tensors, where each rank has its own weight.
        inputs: What derivatives are with respect to.
        rank: Whose result and tangent are wanted.
    """

    def losses() -> tuple[Any, Any]:
        results = run([x * x for x in inputs])
        return results[rank], tf.add_n([tf.reduce_sum(tf.sin(y) * (r + 1)) for r, y in results[-1]])

    # What the ranks other than the root have put into a broadcast is lost.
    zero = tf.UnconnectedGradients.ZERO
    with tf.GradientTape() as outer:
        outer.watch(inputs)
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            result, loss = losses()
        gradients = tape.gradient(loss, inputs, unconnected_gradients=zero)
        products = tf.add_n([tf.reduce_sum(tf.sin(g)) for g in gradients])
    second = outer.gradient(products, inputs, unconnected_gradients=zero)
    with tf.autodiff.ForwardAccumulator(inputs, [tf.cos(x) for x in inputs]) as forward:
        output, _ = losses()
    return {
        "result": result,
        "gradient": gradients,
        "second": second,
        "tangent": forward.jvp(output),
    }


class OfRanks(dict[int, Any]):
    """Results by rank; under -1, all that are here, with their ranks."""

    def __init__(self, results: dict[int, Any]) -> None:
        super().__init__(results)
        self[-1] = list(results.items())


def worker(cases: list[tuple[str, str]]) -> dict[Any, Any]:
    import tensorflow as tf

    with join(timeout=60.0) as comm:
        found: dict[Any, Any] = {}
        for name, inputs in INPUTS.items():

            def run(tensors: list[Any], name: str = name) -> OfRanks:
                return OfRanks({comm.rank: collective(name, comm, tensors[0])})

            def call(x: Any, run: Any = run) -> dict[str, Any]:
                return derivatives(tf, run, [x], comm.rank)

            own = tf.constant(inputs[comm.rank])
            unknown = tf.TensorSpec([None, 2], tf.float64)
            ways: dict[str, Any] = {
                "eager": call,
                "graph": tf.function(call, autograph=False),
                "unknown length": tf.function(call, [unknown], autograph=False),
            }
            for way, function in ways.items():
                if (name, way) not in cases:
                    continue
                for what, value in function(own).items():
                    value = value[0] if isinstance(value, list) else value
                    found[name, way, what] = value.numpy()
        found["refused"] = refused(tf, comm)
        found["dtypes"] = dtypes(tf, comm)
        found["vectorised"] = in_a_vectorised_loop(tf, comm)
        found["unlike"] = unlike(tf, comm)
        return found


def refused(tf: Any, comm: Any) -> list[str]:
    from gradring.tensorflow import all_to_all, reduce_scatter

    def said(kind: type[Exception], call: Any, *given: Any) -> str:
        with pytest.raises(kind) as caught:
            call(*given)
        return str(caught.value)

    attempts: list[Any] = [
        lambda: all_to_all(tf.zeros([4, 2]), communicator=comm),
        lambda: all_to_all(tf.constant(1.0), communicator=comm),
        lambda: reduce_scatter(tf.constant(1.0), communicator=comm),
        lambda: reduce_scatter(tf.zeros([4]), "median", communicator=comm),
        lambda: all_to_all(tf.zeros([4, 2]), communicator=comm, splits=[2, 2, 1]),
        lambda: all_to_all(tf.zeros([4, 2]), communicator=comm, splits=[5, -1, 0]),
        lambda: all_to_all(tf.zeros([4, 2]), communicator=comm, splits=[2, 2]),
    ]
    messages = [said(ValueError, wrong) for wrong in attempts]
    with tf.GradientTape() as tape:
        x = tf.ones([3])
        tape.watch(x)
        y = reduce_scatter(x, "max", communicator=comm)
    messages.append(said(LookupError, tape.gradient, y, x))
    for divides in (all_to_all, reduce_scatter):
        loop: Any = tf.function(
            lambda rows, divides=divides: tf.vectorized_map(
                lambda row: divides(row, communicator=comm), rows, fallback_to_while_loop=False
            )
        )
        messages.append(said(NotImplementedError, loop, tf.zeros([2, 3])))
    unequal: Any = tf.function(
        lambda splits: tf.vectorized_map(
            lambda each: all_to_all(tf.zeros([3]), communicator=comm, splits=each)[0],
            splits,
            fallback_to_while_loop=False,
        )
    )
    messages.append(said(NotImplementedError, unequal, tf.ones([2, 3], tf.int32)))
    in_graph: Any = tf.function(lambda x, splits: all_to_all(x, communicator=comm, splits=splits))
    late = in_graph.get_concrete_function(
        tf.TensorSpec([None], tf.float32), tf.TensorSpec([None], tf.int32)
    )
    for splits in ([2, 1, 0], [5, -1, 0], [4]):
        wrong = tf.zeros([4]), tf.constant(splits)
        messages.append(said(tf.errors.InvalidArgumentError, late, *wrong))
    return messages


def in_a_vectorised_loop(tf: Any, comm: Any) -> list[Any]:
    """Rows of all iterations, exchanged at once."""
    from gradring.tensorflow import all_to_all

    exchange: Any = tf.function(
        lambda rows: tf.vectorized_map(
            lambda row: all_to_all(row, communicator=comm, splits=SPLITS[comm.rank])[0], rows
        )
    )
    rows: list[Any] = exchange(tf.reshape(tf.range(12), [2, 6]) + 100 * comm.rank).numpy().tolist()
    return rows


#: Dtypes of two ranks, which travel as one.
UNLIKE = {
    "all_gather": ("bool", "int8"),
    "all_reduce": ("int8", "int16"),
    "all_to_all": ("uint8", "int8"),
    "all_to_all, splits": ("bool", "int8"),
    "broadcast": ("bool", "uint8"),
    "reduce_scatter": ("int32", "int8"),
}


def unlike(tf: Any, comm: Any) -> dict[str, str]:
    """What is said where rank 1 has another dtype, each in a group of its own."""
    from gradring import tensorflow as of

    said = {}
    for name, dtypes in UNLIKE.items():
        x = tf.cast(tf.ones([RANKS]), dtypes[comm.rank == 1])
        more = {"splits": [1] * RANKS} if name.endswith("splits") else {}
        run = getattr(of, name.partition(",")[0])
        with comm.split(0) as group:
            with pytest.raises((tf.errors.AbortedError, MismatchError)) as caught:
                run(x, name="x", communicator=group, **more)
                group.barrier()  # where a root is told that had done its part
            said[name] = str(caught.value)
    return said


def dtypes(tf: Any, comm: Any) -> list[str]:
    """Those whose results are wrong."""
    from gradring.tensorflow import all_to_all, reduce_scatter

    wrong = []
    own = np.arange(6) + comm.rank
    for name in ("float16", "bfloat16", "int8", "uint32", "int64", "uint8"):
        x = tf.cast(tf.constant(own), name)
        total = tf.cast(tf.constant((np.arange(6) * 3 + 3).reshape(3, 2)[comm.rank]), name)
        parted = tf.cast(tf.constant(np.repeat([0, 1, 2], 2) + [0, 1] * 3 + 2 * comm.rank), name)
        results = [(reduce_scatter(x, communicator=comm), total)]
        results.append((all_to_all(x, communicator=comm), parted))
        results.append((all_to_all(x, communicator=comm, splits=[2, 2, 2])[0], parted))
        if not all(y.dtype == x.dtype and bool(tf.reduce_all(y == z)) for y, z in results):
            wrong.append(name)
    flags = tf.constant([False, True, comm.rank == 2])
    expected = [[False] * 3, [True] * 3, [False, False, True]][comm.rank]
    for got in (
        all_to_all(flags, communicator=comm),
        all_to_all(flags, communicator=comm, splits=[1, 1, 1])[0],
    ):
        if got.numpy().tolist() != expected:
            wrong.append("bool")
    pairs, _ = all_to_all(tf.complex([1.0, 2.0, 3.0], 4.0), communicator=comm, splits=[1, 1, 1])
    if pairs.numpy().tolist() != [comm.rank + 1 + 4j] * 3:
        wrong.append("complex64")
    return wrong


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> list[dict[Any, Any]]:
    results: list[dict[Any, Any]] = run_ranks(worker, RANKS, chosen(request, "case"), timeout=280)
    return results


@pytest.fixture(scope="module")
def expected() -> dict[Any, Any]:
    import tensorflow as tf

    values = {}
    for name, inputs in INPUTS.items():
        tensors = [tf.constant(x) for x in inputs]

        def run(tensors: list[Any], name: str = name) -> OfRanks:
            return OfRanks(dict(enumerate(together(tf, name, tensors))))

        for rank in range(RANKS):
            for what, value in derivatives(tf, run, tensors, rank).items():
                value = value[rank] if isinstance(value, list) else value
                values[name, what, rank] = value.numpy()
    return values


@pytest.mark.parametrize("case", marked(CASES, QUICK), ids="-".join)
def test_results_and_derivatives_are_those_of_one_process(
    found: list[dict[Any, Any]], expected: dict[Any, Any], case: tuple[str, str]
) -> None:
    name, way = case
    for rank, of_rank in enumerate(found):
        for what in DERIVATIVES:
            np.testing.assert_allclose(
                of_rank[name, way, what],
                expected[name, what, rank],
                rtol=1e-12,
                atol=1e-12,
                err_msg=f"{what} of rank {rank}",
            )


def test_what_has_no_meaning_is_refused(found: list[dict[Any, Any]]) -> None:
    says = [
        "a first dimension of 4 has no 3 equal parts",
        "all_to_all: a scalar has no dimension to divide along",
        "reduce_scatter: a scalar has no dimension to divide along",
        "op='median' is none of sum, mean",
        "splits=[2, 2, 1] do not add up to the number of rows, 4",
        "splits=[5, -1, 0] would give a rank less than no rows",
        "splits have shape (2,); give one for each of 3 ranks",
        "no gradient is defined through max",
        "iterations of a vectorised loop cannot send parts to ranks",
        "iterations of a vectorised loop cannot send parts to ranks",
        "iterations of a vectorised loop cannot send parts to ranks",
        "the splits do not add up to the number of rows",
        "a split is negative",
        "is not compatible with expected shape [3]",
    ]
    for of_rank in found:
        for message, part in zip(of_rank["refused"], says, strict=True):
            assert part in message


def test_rows_of_a_vectorised_loop_are_exchanged_together(found: list[dict[Any, Any]]) -> None:
    rows = [np.arange(12).reshape(2, 6) + 100 * rank for rank in range(RANKS)]
    sent = [
        np.split(of, np.cumsum(splits)[:-1], 1) for of, splits in zip(rows, SPLITS, strict=True)
    ]
    for rank, of_rank in enumerate(found):
        expected = np.concatenate([of_sender[rank] for of_sender in sent], 1)
        assert of_rank["vectorised"] == expected.tolist()


def test_ranks_with_unlike_dtypes_that_travel_as_one_are_told(found: list[dict[Any, Any]]) -> None:
    for of_rank in found:
        for name, dtypes in UNLIKE.items():
            # What travels as it is needs no other name.
            own = [f"'x{'' if each in ('uint8', 'int32') else f' of {each}'}'" for each in dtypes]
            for part in ("rank 1 on ", *own):
                assert part in of_rank["unlike"][name], (name, of_rank["unlike"][name])


def test_every_dtype_is_divided_exactly(found: list[dict[Any, Any]]) -> None:
    assert [of_rank["dtypes"] for of_rank in found] == [[]] * RANKS
