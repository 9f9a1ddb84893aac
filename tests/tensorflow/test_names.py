"""Names of collectives, and what two ranks say that call different ones."""

from collections.abc import Callable
from typing import Any

import pytest

from gradring.machine.ports import free_ports
from gradring.testing import run_ranks
from support.tf_worker import join

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


def mistakes(addresses: list[str]) -> dict[str, str]:
    """What this rank is told of each mistake; each happens in a group of its own."""
    import gradring

    rank = join().rank
    found = {}
    for (mistake, make), address in zip(MISTAKES.items(), addresses, strict=True):
        with gradring.Communicator(rank, 2, address) as comm:
            found[mistake] = make(comm)
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


MISTAKES: dict[str, Callable[[Any], str]] = {
    # Rank 1 applies the gradients of two layers of one shape in the other order.
    "swapped": lambda comm: keras_step(comm, lambda p: [p[1], p[0]] if comm.rank == 1 else p),
    # Rank 1 trains a layer more.
    "one more": lambda comm: keras_step(comm, lambda p: p if comm.rank == 1 else p[:1]),
    # Each rank trains one of two layers of one shape.
    "others": lambda comm: keras_step(comm, lambda p: p[comm.rank : comm.rank + 1]),
    "reducer": reducer_swapped,
    "gaps": reducer_gaps,
    "shapes": strategy_shapes,
}
#: What both ranks are told; names are in the order in which gradients get ready.
TOLD = {
    "swapped": (
        "'sum: sequential/dense_1/kernel, sequential/dense/kernel'",
        "'sum: sequential_1/dense_1/kernel, sequential_1/dense_2/kernel'",
    ),
    "one more": (
        "'sum: sequential/dense/kernel' float32[4,4]",
        "sequential_1/dense_2/kernel, sequential_1/dense_1/kernel'",
    ),
    "others": ("'sum: sequential/dense/kernel'", "'sum: sequential_1/dense_2/kernel'"),
    "reducer": ("'gradients: right/kernel, left/kernel'", "'gradients: left/kernel, right/kernel'"),
    "gaps": ("'gradients without 1, 2'", "'gradients without 0, 2'"),
    "shapes": ("embedding", "float32[3]", "float32[4]"),
}


@pytest.fixture(scope="module")
def told() -> Any:
    return run_ranks(mistakes, 2, [f"127.0.0.1:{port}" for port in free_ports(len(MISTAKES))])


@pytest.mark.parametrize("mistake", MISTAKES)
def test_ranks_that_reduce_different_variables_are_told_both(told: Any, mistake: str) -> None:
    """Keras' models, of other counters on each rank, have trained before the mistake."""
    for message in (rank[mistake] for rank in told):
        assert "MismatchError" in message
        assert all(words in message for words in TOLD[mistake]), message


def with_a_name_that_is_no_text() -> dict[str, list[float]]:
    import tensorflow as tf

    import gradring.tensorflow as under_test

    calls = {"all_reduce": under_test.all_reduce, "all_gather": under_test.all_gather}
    with join():
        return {
            f"{name}, {how}": run(lambda call=call: call(tf.ones(2), name="load \udcff.npz"))()
            .numpy()
            .tolist()
            for name, call in calls.items()
            for how, run in {"eager": lambda it: it, "graph": tf.function}.items()
        }


def test_a_name_may_quote_that_of_a_file_which_is_no_text() -> None:
    (found,) = run_ranks(with_a_name_that_is_no_text, 1)
    assert len(found) == 4 and all(value == [1.0, 1.0] for value in found.values())
