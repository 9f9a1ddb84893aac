"""Graphs with the ops, and what TensorFlow, and other code that changes them, may do."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import gradring
from gradring.testing import run_ranks
from support.tf_worker import join

MEBIBYTE = 1 << 20


@pytest.fixture(scope="module")
def alone() -> Iterator[gradring.Communicator]:
    with gradring.Communicator(0, 1) as communicator:
        yield communicator


def started(tensors: list[Any], communicator: Any) -> list[Any]:
    """Tensors in flight, and their handle."""
    from gradring.gradients.names import Label
    from gradring.gradients.reduction import Collective
    from gradring.tensorflow.graph.start_wait import start

    return start(tensors, Collective(communicator, Label.of("by hand")))


def waited(inflight: list[Any], handle: Any) -> list[Any]:
    from gradring.tensorflow.graph.start_wait import wait

    return wait([[*inflight, handle]])[0]


def test_a_wait_returns_what_its_start_worked_on_whatever_it_is_handed(
    alone: gradring.Communicator,
) -> None:
    import tensorflow as tf

    @tf.function  # type: ignore[untyped-decorator]
    def step(x: Any) -> Any:
        first, second, handle = started([x * 2, x * 3], alone)
        with tf.control_dependencies([handle]):
            others = [tf.zeros_like(first), tf.random.uniform(tf.shape(second))]
        return waited(others, handle)

    x = np.arange(8, dtype=np.float32)
    for _ in range(3):
        first, second = step(tf.constant(x))
        np.testing.assert_array_equal(first, x * 2)
        np.testing.assert_array_equal(second, x * 3)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("shape", "not those of its Start"),
        ("order", "not those of its Start"),
        ("number", "not those of its Start"),
        ("handle", "no collective of handle"),
        ("twice", "no collective of handle"),
    ],
)
def test_a_wait_of_something_else_fails_by_name(
    alone: gradring.Communicator, change: str, says: str
) -> None:
    import tensorflow as tf

    @tf.function  # type: ignore[untyped-decorator]
    def step(x: Any) -> Any:
        first, second, handle = started([x, tf.concat([x, x], 0)], alone)
        if change == "shape":
            return waited([tf.reshape(first, [2, -1]), second], handle)
        if change == "order":
            return waited([second, first], handle)
        if change == "number":
            return waited([first], handle)
        if change == "handle":
            return waited([first, second], handle + 1_000_000)
        once = waited([first, second], handle)
        with tf.control_dependencies(once):
            return waited([first, second], handle)

    with pytest.raises(tf.errors.AbortedError, match=says):
        step(tf.ones([4]))
    np.testing.assert_array_equal(waited(*split(started([tf.ones([2])], alone))), [[1.0, 1.0]])


def split(inflight: list[Any]) -> tuple[list[Any], Any]:
    *tensors, handle = inflight
    return tensors, handle


def test_steps_that_fail_between_start_and_wait_keep_no_memory(
    alone: gradring.Communicator,
) -> None:
    import tensorflow as tf

    @tf.function  # type: ignore[untyped-decorator]
    def step(x: Any) -> Any:
        tensors, handle = split(started([tf.ones([4 * MEBIBYTE]) * x], alone))
        with tf.control_dependencies([handle]):
            check = tf.debugging.assert_positive(x)
        with tf.control_dependencies([check]):
            return tf.reduce_sum(waited(tensors, handle))

    def resident() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * 4096

    assert step(tf.constant(1.0)) == 4 * MEBIBYTE
    before = resident()
    for _ in range(64):
        with pytest.raises(tf.errors.InvalidArgumentError):
            step(tf.constant(-1.0))
    # They would be 1 GiB.
    assert resident() - before < 256 * MEBIBYTE
    assert step(tf.constant(1.0)) == 4 * MEBIBYTE


def test_debugging_does_not_look_at_what_is_in_flight(alone: gradring.Communicator) -> None:
    import tensorflow as tf

    from gradring.tensorflow import all_reduce

    tf.debugging.enable_check_numerics()
    try:
        step = tf.function(lambda x: all_reduce([x * 2, x * 3], "sum", "x", alone))
        graph = step.get_concrete_function(tf.ones([4])).graph
        eager = all_reduce(tf.ones([4]), "sum", "x", alone)
        with pytest.raises(tf.errors.InvalidArgumentError, match="NaN"):
            step(tf.fill([4], np.nan))
    finally:
        tf.debugging.disable_check_numerics()
    np.testing.assert_array_equal(eager, np.ones(4))
    (start,) = (op for op in graph.get_operations() if op.type == "GradringStart")
    readers = {op.type for tensor in start.outputs[:-1] for op in tensor.consumers()}
    assert readers == {"GradringWait"}


def test_a_collective_of_a_dataset_or_of_an_old_graph_is_refused_by_name(
    alone: gradring.Communicator,
) -> None:
    import tensorflow as tf

    from gradring.tensorflow import all_reduce

    def reduce(x: Any) -> Any:
        return all_reduce(x, "sum", "x", alone)

    numbers = tf.data.Dataset.range(4)
    transforms: list[Any] = [
        lambda f: numbers.map(f, num_parallel_calls=2),
        lambda f: numbers.filter(lambda x: f(x) > 1),
        lambda f: numbers.flat_map(lambda x: tf.data.Dataset.from_tensors(f(x))),
        lambda f: numbers.map(lambda x: tf.cond(x > 1, lambda: f(x), lambda: x)),
        lambda f: numbers.map(tf.function(f)),
    ]
    for transform in transforms:
        with pytest.raises(NotImplementedError, match=r"in a function of a tf\.data\.Dataset"):
            transform(reduce)
    # The elements come one after the other, here and now.
    assert numbers.reduce(tf.constant(0, tf.int64), lambda total, x: total + reduce(x)) == 6


@pytest.mark.parametrize("function_is_first", [True, False])
def test_in_a_loop_collectives_keep_their_order_also_with_that_of_a_function(
    alone: gradring.Communicator, function_is_first: bool
) -> None:
    import tensorflow as tf

    from gradring.tensorflow import all_reduce

    def reduce(x: Any) -> Any:
        return all_reduce(x, "sum", "x", alone)

    function, bodies = tf.function(reduce), []

    def body(i: Any, x: Any) -> Any:
        """As that of Keras' `steps_per_execution`: neither branch needs the other."""
        bodies.append(tf.compat.v1.get_default_graph())
        calls = (function, reduce) if function_is_first else (reduce, function)
        first, second = (tf.cond(i >= 0, partial(f, x), lambda: x) for f in calls)
        return i + 1, first + second

    tf.function(lambda x: tf.while_loop(lambda i, _: i < 3, body, [0, x]))(tf.ones([2]))
    branches = [op for op in bodies[0].get_operations() if op.type == "If"]
    assert len(branches) == 2
    assert branches[0] in branches[1].control_inputs


def two_ranks() -> Any:
    import tensorflow as tf

    from gradring.tensorflow import all_reduce

    with join() as comm, gradring.Communicator(0, 1) as own:

        def reduce(x: Any, name: str = "x", communicator: Any = comm) -> Any:
            return all_reduce(x, "sum", name, communicator)

        mine = tf.constant(comm.rank + 1.0)

        def twice(x: Any) -> Any:
            """Equal ops on equal inputs, which are not the same collective."""
            return [reduce(x), reduce(x), reduce(tf.constant(2.0)), reduce(tf.constant(2.0))]

        def broken_off(x: Any) -> Any:
            """What comes before and after the loop does not need it."""
            before, total = reduce(x, "before"), tf.zeros([])
            for number in tf.range(10):
                if number == 3:
                    break
                if number == 1:
                    continue
                total += reduce(x * tf.cast(number, tf.float32))
            return [before, total, reduce(tf.ones([]), "after")]

        def mixed(x: Any) -> Any:
            return [reduce(x), reduce(x, communicator=own), reduce(reduce(x, communicator=own))]

        def invariant(x: Any) -> Any:
            _, total = tf.while_loop(
                lambda i, _: i < 4,
                lambda i, total: (i + 1, total + reduce(tf.ones([]))),
                [0, x],
            )
            return total

        def through_python(x: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = tf.py_function(lambda x: reduce(x * x, "in Python"), [x], tf.float32)
            return tape.gradient(y, x)

        @tf.function(reduce_retracing=True)  # type: ignore[untyped-decorator]
        def relaxed(x: Any) -> Any:
            return reduce(x)

        def in_order(count: int) -> Any:
            """A loop whose iterations do not need each other, and take as long as they like."""
            sizes = tf.constant([100 + 300 * ((i * 7 + comm.rank * 3) % 4) for i in range(count)])

            def body(i: Any) -> Any:
                square = tf.fill([sizes[i], sizes[i]], 1e-4)
                return reduce(tf.cast(i, tf.float32) + 0 * tf.reduce_sum(square @ square))

            return tf.map_fn(
                body, tf.range(count), fn_output_signature=tf.float32, parallel_iterations=8
            )

        return {
            "equal ones": [float(x) for x in tf.function(twice)(mine)],
            "a loop with break and continue": [float(x) for x in tf.function(broken_off)(mine)],
            "two communicators": [float(x) for x in tf.function(mixed)(mine)],
            "an invariant of a loop": float(tf.function(invariant)(mine)),
            "a gradient of a py_function": float(tf.function(through_python)(mine)),
            "relaxed shapes": [relaxed(tf.ones([n])).numpy().tolist() for n in (1, 2, 3)],
            "iterations side by side": tf.function(in_order)(24).numpy().tolist(),
        }


#: By what is in a graph, what the two ranks get.
IN_A_GRAPH: dict[str, list[Any]] = {
    "equal ones": [[3.0, 3.0, 4.0, 4.0]] * 2,  # neither merged nor folded
    "a loop with break and continue": [[3.0, 6.0, 2.0]] * 2,
    "two communicators": [[3.0, 1.0, 3.0], [3.0, 2.0, 3.0]],
    "an invariant of a loop": [9.0, 10.0],  # it is not moved out
    "a gradient of a py_function": [4.0, 8.0],
    "relaxed shapes": [[[2.0], [2.0] * 2, [2.0] * 3]] * 2,
    "iterations side by side": [[2.0 * i for i in range(24)]] * 2,
}


@pytest.fixture(scope="module")
def ranks() -> Any:
    return run_ranks(two_ranks, 2)


@pytest.mark.parametrize("case", IN_A_GRAPH)
def test_collectives_of_a_graph_are_those_that_the_program_has(ranks: Any, case: str) -> None:
    assert [found[case] for found in ranks] == IN_A_GRAPH[case]
