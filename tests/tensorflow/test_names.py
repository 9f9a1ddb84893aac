"""Names of collectives, and what two ranks say that call different ones."""

from typing import Any

import pytest
from tf_worker import join

from gradring.machine.ports import free_ports
from gradring.testing import run_ranks

COUNTERS = (
    (["a/kernel", "a/bias"], ["a/kernel", "a/bias"]),
    (["dense_4/kernel", "dense_7/kernel"], ["dense#0/kernel", "dense#1/kernel"]),
    (["dense_7/kernel", "dense_4/kernel"], ["dense#1/kernel", "dense#0/kernel"]),
    (["m_1/dense/k", "m_1/dense_1/k"], ["m/dense#0/k", "m/dense#1/k"]),
    (["dense_9/k", "dense_10/k"], ["dense#0/k", "dense#1/k"]),
    (["2/3", "_1"], ["2/3", "_1"]),
)


@pytest.mark.parametrize(("names", "expected"), COUNTERS)
def test_counters_are_compared_by_their_order(names: list[str], expected: list[str]) -> None:
    from gradring.gradients.names import without_counters

    assert without_counters(names) == expected


def test_a_long_bucket_shows_some_names_and_compares_all() -> None:
    from gradring.gradients.names import Names

    variables = [f"layer/with/a/long/path/{letter}" for letter in "abcdefghijklmnop"]
    swapped = [*variables[:-2], variables[-1], variables[-2]]
    everything = range(len(variables))
    label = Names.of_variables("g", variables, variables).of(everything)
    other = Names.of_variables("g", swapped, swapped).of(everything)
    assert label.shown.startswith("g: layer/with/a/long/path/a, ")
    assert label.shown.endswith("more)") and len(label.shown) < 300
    assert (label.shown, label.compared) != (other.shown, other.compared)
    assert label.compared != other.compared


def test_as_many_names_as_tensors_are_needed() -> None:
    from gradring.gradients.names import Names

    with pytest.raises(ValueError, match="2 variables cannot name 1 tensors"):
        Names.of_variables("g", [1.0], ["a", "b"])


def caught(call: Any) -> str:
    """The message of the AbortedError that `call` raises."""
    import tensorflow as tf

    try:
        call()
    except tf.errors.AbortedError as error:
        return str(error)
    return "nothing was raised"


SCENARIOS = ("swapped", "one more", "others", "reducer", "gaps", "shapes")


def mistakes(addresses: list[str]) -> dict[str, str]:
    """What this rank is told of each mistake; each happens in a group of its own."""
    import gradring

    rank = join().rank
    found = {}
    for scenario, address in zip(SCENARIOS, addresses, strict=True):
        with gradring.Communicator(rank, 2, address) as comm:
            if scenario == "swapped":
                # Rank 1 applies the gradients of two layers of one shape in the other order.
                found[scenario] = keras_step(comm, lambda p: [p[1], p[0]] if rank == 1 else p)
            elif scenario == "one more":
                # Rank 1 trains a layer more.
                found[scenario] = keras_step(comm, lambda p: p if rank == 1 else p[:1])
            elif scenario == "others":
                # Each rank trains one of two layers of one shape.
                found[scenario] = keras_step(comm, lambda p: p[rank : rank + 1])
            elif scenario == "reducer":
                found[scenario] = reducer_swapped(comm)
            elif scenario == "gaps":
                found[scenario] = reducer_gaps(comm)
            else:
                found[scenario] = strategy_shapes(comm)
    return found


def keras_step(comm: Any, chosen: Any) -> str:
    import keras
    import tensorflow as tf

    from gradring.tensorflow import CustomCollectiveStrategy

    keras.backend.clear_session()
    if comm.rank == 1:
        # Counters of layers differ between the ranks from here on.
        keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(4)])
    strategy = CustomCollectiveStrategy(communicator=comm)
    with strategy.scope():
        layers = [keras.layers.Dense(4, use_bias=False) for _ in range(2)]
        model = keras.Sequential([keras.layers.Input((4,)), *layers])
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)

    def replica_step(wrong: bool) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(tf.ones([2, 4])))
        pairs = list(zip(tape.gradient(loss, model.weights), model.weights, strict=True))
        optimizer.apply_gradients(chosen(pairs) if wrong else pairs)

    strategy.run(replica_step, args=(False,))
    tf.function(strategy.run)(replica_step, args=(False,))
    return caught(lambda: tf.function(strategy.run)(replica_step, args=(True,)))


def reducer_swapped(comm: Any) -> str:
    """Rank 1 passes two gradients of one shape in the other order."""
    import tensorflow as tf

    from gradring.tensorflow import GradientReducer

    names = ["left/kernel", "right/kernel"]
    reduce_gradients = GradientReducer(communicator=comm)
    reduce_gradients([tf.ones([3])] * 2, names)
    return caught(lambda: reduce_gradients([tf.ones([3])] * 2, names if comm.rank else names[::-1]))


def reducer_gaps(comm: Any) -> str:
    """Ranks have gradients of different variables, which have the same shape and no names."""
    import tensorflow as tf

    from gradring.tensorflow import GradientReducer

    gradients = [None, tf.ones([3]), None] if comm.rank else [tf.ones([3]), None, None]
    reduce_gradients = GradientReducer(communicator=comm)
    return caught(lambda: reduce_gradients(gradients))


def strategy_shapes(comm: Any) -> str:
    """Rank 1 reduces another shape for a variable, through batch_reduce_to."""
    import tensorflow as tf

    from gradring.tensorflow import CustomCollectiveStrategy

    strategy = CustomCollectiveStrategy(communicator=comm)
    with strategy.scope():
        variable = tf.Variable(tf.zeros([3]), name="embedding")
    value = tf.ones([3 + comm.rank])
    return caught(lambda: strategy.extended.batch_reduce_to("SUM", [(value, variable)]))


@pytest.fixture(scope="module")
def told() -> Any:
    return run_ranks(mistakes, 2, [f"127.0.0.1:{port}" for port in free_ports(len(SCENARIOS))])


def test_counters_that_differ_train_and_swapped_variables_do_not(told: Any) -> None:
    for rank in told:
        message = rank["swapped"]
        assert "MismatchError" in message
        # Rank 0's names, in the order in which gradients get ready, and rank 1's.
        assert "'sum: sequential/dense_1/kernel, sequential/dense/kernel'" in message
        assert "'sum: sequential_1/dense_1/kernel, sequential_1/dense_2/kernel'" in message


def test_one_variable_more_is_named_with_all_others(told: Any) -> None:
    for rank in told:
        message = rank["one more"]
        assert "MismatchError" in message
        assert "'sum: sequential/dense/kernel' float32[4,4]" in message
        assert "sequential_1/dense_2/kernel, sequential_1/dense_1/kernel'" in message


@pytest.mark.parametrize(
    ("scenario", "names"),
    [
        ("others", ["sum: sequential/dense/kernel", "sum: sequential_1/dense_2/kernel"]),
        (
            "reducer",
            ["gradients: right/kernel, left/kernel", "gradients: left/kernel, right/kernel"],
        ),
        ("gaps", ["gradients without 1, 2", "gradients without 0, 2"]),
    ],
)
def test_gradients_of_different_variables_do_not_meet(
    told: Any, scenario: str, names: list[str]
) -> None:
    for rank in told:
        message = rank[scenario]
        assert "MismatchError" in message
        assert all(f"'{name}'" in message for name in names), message


def test_another_shape_names_the_variable_and_both_shapes(told: Any) -> None:
    for rank in told:
        message = rank["shapes"]
        assert "MismatchError" in message and "embedding" in message
        assert "float32[3]" in message and "float32[4]" in message
