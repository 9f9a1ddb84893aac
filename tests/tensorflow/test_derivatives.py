"""Derivatives of collectives, and loops that TensorFlow vectorises, against one process.

Every program below is written for tensors whose first dimension is the rank: the ranks run it on
one row each, with gradring's collectives; the oracle runs it on all rows at once, in one process.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gradring.testing import run_ranks
from support.chosen import chosen, marked
from support.tf_worker import join

RANKS = 2
INPUTS = np.array([[1.0, 2.0, 3.0], [0.5, -1.0, 4.0]], np.float32)
#: Of the ranks' losses.
WEIGHTS = np.array([[1.0], [3.0]], np.float32)

Reduce = Callable[..., Any]
#: Of a tensor and a reduction; what they do is smooth, and none of it is linear.
PROGRAMS: dict[str, Callable[[Any, Any, Reduce], Any]] = {
    "sum": lambda tf, x, reduce: x * reduce(x * x),
    "mean": lambda tf, x, reduce: x * reduce(x * x, "mean"),
    "several": lambda tf, x, reduce: tf.add_n(reduce([x * x, x**3, x])),
    "cond": lambda tf, x, reduce: tf.cond(
        tf.size(x) > 0, lambda: x * reduce(x * x), lambda: tf.zeros_like(x)
    ),
    "nested cond": lambda tf, x, reduce: tf.cond(
        tf.size(x) > 0,
        lambda: reduce(x) * tf.cond(tf.size(x) > 1, lambda: reduce(x * x), lambda: x),
        lambda: x,
    ),
    "while": lambda tf, x, reduce: tf.while_loop(
        lambda i, _: i < 3, lambda i, y: (i + 1, x * tf.sin(reduce(y * y, "mean"))), [0, x]
    )[1],
    "cond in while": lambda tf, x, reduce: tf.while_loop(
        lambda i, _: i < 3,
        lambda i, y: (i + 1, tf.cond(i > 0, lambda: tf.sin(reduce(y * y)), lambda: y)),
        [0, x],
    )[1],
    "map_fn": lambda tf, x, reduce: tf.transpose(
        tf.map_fn(lambda column: column * reduce(column * column), tf.transpose(x))
    ),
    "scan": lambda tf, x, reduce: tf.transpose(
        tf.scan(lambda total, column: total + reduce(total * column), tf.transpose(x))
    ),
    "function": lambda tf, x, reduce: tf.function(lambda y: y * reduce(y * y))(x),
    "recompute_grad": lambda tf, x, reduce: tf.recompute_grad(lambda y: y * reduce(y * y))(x),
    "custom_gradient": lambda tf, x, reduce: tf.custom_gradient(
        lambda y: (reduce(y * y), lambda upstream: 2 * y * reduce(upstream))
    )(x),
}
#: Of one dimension more than the others: what a loop body does to one iteration's tensor.
BODIES: dict[str, Callable[[Any, Any, Reduce], Any]] = {
    "body": lambda tf, x, reduce: x * reduce(x * x),
    "body with mean": lambda tf, x, reduce: reduce(x, "mean") ** 2,
    "body with max": lambda tf, x, reduce: reduce(x, "max"),
    "body of several": lambda tf, x, reduce: tf.concat(reduce([x, x[:, :1] * 2]), -1),
    "body with an invariant": lambda tf, x, reduce: x + reduce(tf.ones_like(x[:, :1])),
    "body with a mixture": lambda tf, x, reduce: tf.add_n(reduce([x, tf.ones([1, 3])])),
    "body with cond": lambda tf, x, reduce: tf.cond(
        tf.size(x) > 0, lambda: reduce(x * x), lambda: x
    ),
    "body with while": lambda tf, x, reduce: tf.while_loop(
        lambda i, _: i < 2, lambda i, y: (i + 1, tf.sin(reduce(y))), [0, x]
    )[1],
}
DERIVATIVES = ("gradient", "twice", "hessian", "jacobian", "jacobian by a loop", "tangent")
#: TensorFlow itself has no tangents of a loop that reads a variable, neither tangents nor second
#: derivatives of `recompute_grad`, and cannot trace variables back through control flow inside
#: control flow.
IMPOSSIBLE = {
    "tangent": ("nested cond", "while", "cond in while", "map_fn", "scan", "recompute_grad"),
    "twice": ("nested cond", "cond in while"),
    "hessian": ("nested cond", "cond in while", "recompute_grad"),
}
#: In every run of the tests: a gradient of each program, and each other derivative of one or two.
QUICK = (
    *(("gradient", name) for name in PROGRAMS),
    *(("twice", "while"), ("hessian", "cond"), ("jacobian", "several")),
    *(("jacobian by a loop", "sum"), ("tangent", "cond"), ("tangent", "function")),
)
QUICK_BODIES = ("body with max", "body with a mixture", "body with while")


def derivative(tf: Any, what: str, program: Any, rows: Any, weights: Any, reduce: Reduce) -> Any:
    """A derivative of a program with respect to its rows."""
    if what == "tangent":
        with tf.autodiff.ForwardAccumulator(rows, weights * tf.ones_like(rows)) as forward:
            result = program(tf, rows, reduce)
        return forward.jvp(result)
    if what == "hessian":
        with tf.GradientTape() as outer:
            outer.watch(rows)
            first = derivative(tf, "gradient", program, rows, weights, reduce)
            product = first * tf.sin(rows)
        return outer.gradient(product, rows)
    with tf.GradientTape(persistent=what == "twice") as tape:
        tape.watch(rows)
        result = program(tf, rows, reduce)
        loss = tf.reduce_sum(result * weights)
    if what.startswith("jacobian"):
        return tape.jacobian(result, rows, experimental_use_pfor=what == "jacobian")
    again = tape.gradient(loss, rows) if what == "twice" else 0.0
    return tape.gradient(loss, rows) + again


def worker(cases: list[tuple[str, str]], bodies: list[str]) -> Any:
    import tensorflow as tf

    from gradring.tensorflow import all_reduce

    with join(timeout=60.0) as comm:

        def reduce(tensors: Any, op: str = "sum") -> Any:
            return all_reduce(tensors, op, "reduced", comm)

        own = slice(comm.rank, comm.rank + 1)
        rows, weights = tf.constant(INPUTS[own]), tf.constant(WEIGHTS[own])
        found: dict[Any, Any] = {}
        for what, name in cases:
            call = tf.function(derivative, autograph=False)
            found[what, name, "graph"] = call(tf, what, PROGRAMS[name], rows, weights, reduce)
            if what in ("gradient", "jacobian"):
                eager = derivative(tf, what, PROGRAMS[name], rows, weights, reduce)
                found[what, name, "eager"] = eager
        for name in bodies:
            found[name] = tf.vectorized_map(
                lambda row, body=BODIES[name]: body(tf, row, reduce),
                iterations(tf)[:, own],
                fallback_to_while_loop=False,
            )
        found = {key: tensor.numpy() for key, tensor in found.items()}
        found |= of_rows(tf, comm, rows)
        found |= normalization(tf, comm)
        return found


def cases() -> list[tuple[str, str]]:
    return [
        (what, name)
        for what in DERIVATIVES
        for name in PROGRAMS
        if name not in IMPOSSIBLE.get(what, ())
    ]


def iterations(tf: Any) -> Any:
    """Four of them, of all rows."""
    return tf.constant(INPUTS) * tf.reshape(tf.constant([1.0, 2.0, -1.0, 0.5]), [4, 1, 1])


def of_rows(tf: Any, comm: Any, rows: Any) -> Any:
    """Gathers, broadcasts, and what has no derivative."""
    from gradring.tensorflow import all_reduce
    from gradring.tensorflow.graph.ops import all_gather, broadcast

    def gather(x: Any) -> Any:
        return all_gather(tf.repeat(x * x, comm.rank + 1, 0), "rows", comm)

    with tf.autodiff.ForwardAccumulator(rows, tf.ones_like(rows)) as forward:
        gathered = gather(rows)
    each = iterations(tf)[:, comm.rank : comm.rank + 1]
    found = {
        "gather tangent": forward.jvp(gathered).numpy(),
        "gather in a vectorised loop": tf.vectorized_map(gather, each).numpy(),
        "broadcast in a vectorised loop": tf.vectorized_map(
            lambda x: broadcast(x * x, 1, "b", comm), each
        ).numpy(),
    }

    def refused(f: Any) -> str:
        with pytest.raises(LookupError) as backward, tf.GradientTape() as tape:
            tape.watch(rows)
            tape.gradient(f(rows), rows)
        with (
            pytest.raises(LookupError) as tangent,
            tf.autodiff.ForwardAccumulator(rows, tf.ones_like(rows)),
        ):
            f(rows)
        assert str(backward.value) == str(tangent.value)
        return str(backward.value)

    called = tf.function(lambda x: all_reduce(x, "sum", "called", comm))

    def lost(program: Any, what: str) -> str:
        with pytest.raises(NotImplementedError) as raised:
            tf.function(derivative, autograph=False)(tf, what, program, rows, 1.0, all_reduce)
        return str(raised.value)

    def in_a_body(tf: Any, x: Any, _: Any) -> Any:
        return tf.while_loop(lambda i, _: i < 2, lambda i, y: (i + 1, called(y)), [0, x])[1]

    def in_a_branch_of_a_branch(tf: Any, x: Any, _: Any) -> Any:
        return PROGRAMS["nested cond"](tf, x, lambda y: all_reduce(y, "sum", "called", comm))

    found["lost"] = {
        "a function in a branch": lost(
            lambda tf, x, _: tf.cond(tf.size(x) > 0, lambda: called(x), lambda: x), "gradient"
        ),
        "a function in a body": lost(in_a_body, "gradient"),
        "a branch in a branch, twice": lost(in_a_branch_of_a_branch, "hessian"),
    }
    found["max has no gradient"] = refused(lambda x: all_reduce(x, "max", "highest", comm))
    return found


def normalization(tf: Any, comm: Any) -> Any:
    """Gradients through a synchronised batch normalisation in a conditional."""
    from gradring.tensorflow import CustomCollectiveStrategy

    strategy = CustomCollectiveStrategy(communicator=comm)
    with strategy.scope():
        model = normalized_model()

    @tf.function  # type: ignore[untyped-decorator]
    def step(x: Any, training: Any) -> Any:
        return strategy.run(normalized_gradients, (tf, model, x, training))

    x = tf.constant(INPUTS[comm.rank][:, None])
    gradients = [tensor.numpy() for tensor in step(x, tf.constant(True))]
    step(x, tf.constant(False))
    return {"normalised": gradients, "moving": model.layers[1].moving_mean.numpy()}


def normalized_model() -> Any:
    import keras

    keras.utils.set_random_seed(3)
    layers = keras.layers
    normalization = layers.BatchNormalization(synchronized=True)
    return keras.Sequential([layers.Input((1,)), layers.Dense(2), normalization, layers.Dense(1)])


def normalized_gradients(tf: Any, model: Any, x: Any, training: Any) -> Any:
    with tf.GradientTape() as tape:
        result = tf.cond(
            training, lambda: model(x, training=True), lambda: model(x, training=False)
        )
        loss = tf.reduce_sum(tf.sin(result))
    return tape.gradient(loss, model.trainable_variables)


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Any:
    cases = chosen(request, "case"), chosen(request, "body")
    return run_ranks(worker, RANKS, *cases, timeout=400.0)


def reduce_rows(tensors: Any, op: str = "sum") -> Any:
    """The oracle's reduction: over the first dimension, in one process."""
    import tensorflow as tf

    if isinstance(tensors, list):
        return [reduce_rows(tensor, op) for tensor in tensors]
    reduced = {"sum": tf.reduce_sum, "mean": tf.reduce_mean, "max": tf.reduce_max}[op]
    every = tf.broadcast_to(tensors, [RANKS, *tensors.shape[1:]])
    return tf.broadcast_to(reduced(every, 0, keepdims=True), tf.shape(every))


@pytest.mark.parametrize("case", marked(cases(), QUICK), ids="-".join)
def test_a_derivative_is_that_of_one_process(ranks: Any, case: tuple[str, str]) -> None:
    import tensorflow as tf

    what, name = case
    rows, weights = tf.constant(INPUTS), tf.constant(WEIGHTS)
    call = tf.function(derivative, autograph=False)
    expected = call(tf, what, PROGRAMS[name], rows, weights, reduce_rows).numpy()
    for rank, found in enumerate(ranks):
        for mode in ("graph", "eager"):
            if (what, name, mode) not in found:
                continue
            own = expected[rank]
            if what.startswith("jacobian"):
                # Of the sum of all ranks' results.
                own = expected.sum(0)[:, rank]
            np.testing.assert_allclose(found[what, name, mode].reshape(own.shape), own, 2e-4)


@pytest.mark.parametrize("body", marked(BODIES, QUICK_BODIES))
def test_a_vectorised_loop_reduces_as_one_iteration_after_the_other(ranks: Any, body: str) -> None:
    import tensorflow as tf

    expected = np.stack([BODIES[body](tf, rows, reduce_rows) for rows in iterations(tf)])
    for rank, found in enumerate(ranks):
        own = expected[:, rank : rank + 1]
        np.testing.assert_allclose(found[body], own, 1e-5)


def test_rows_are_gathered_and_broadcast_in_a_vectorised_loop(ranks: Any) -> None:
    import tensorflow as tf

    squares = iterations(tf).numpy() ** 2
    for found in ranks:
        np.testing.assert_array_equal(found["gather in a vectorised loop"], squares[:, [0, 1, 1]])
        np.testing.assert_array_equal(found["broadcast in a vectorised loop"], squares[:, [1]])


def test_tangents_flow_through_a_gathering(ranks: Any) -> None:
    for found in ranks:
        np.testing.assert_allclose(found["gather tangent"], 2 * INPUTS[[0, 1, 1]])


def test_what_has_no_derivative_is_refused_by_name(ranks: Any) -> None:
    for found in ranks:
        assert "'highest': no gradient is defined through max" in found["max has no gradient"]


def test_where_tensorflow_cannot_lead_a_gradient_the_collective_is_named(ranks: Any) -> None:
    for found in ranks:
        for place, said in found["lost"].items():
            assert said.startswith("'called"), place
            assert "TensorFlow cannot compute a gradient through a collective" in said


def test_a_synchronised_normalisation_in_a_conditional_trains_as_one_process(ranks: Any) -> None:
    import tensorflow as tf

    model = normalized_model()
    x = tf.constant(INPUTS.reshape(-1, 1))
    expected = normalized_gradients(tf, model, x, tf.constant(True))
    for number, gradient in enumerate(expected):
        total = sum(found["normalised"][number] for found in ranks)
        np.testing.assert_allclose(total, gradient, 1e-4, 1e-5)
    for found in ranks:
        np.testing.assert_allclose(found["moving"], model.layers[1].moving_mean, 1e-5)
