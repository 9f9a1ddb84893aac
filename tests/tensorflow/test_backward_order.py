"""The order of the backward pass turns into a cycle neither by itself nor when merged."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from graphlib import TopologicalSorter
from typing import Any

import numpy as np
import pytest

import gradring
from gradring.tensorflow import GradientReducer, all_reduce
from gradring.tensorflow.graph import compat, refused_graphs

Model = Callable[[Any], tuple[Any, list[Any], Any]]


@pytest.fixture(scope="module")
def alone() -> Iterator[gradring.Communicator]:
    with gradring.Communicator(0, 1) as communicator:
        yield communicator


def convolutions(_: Any) -> Any:
    """Layers with biases: oneDNN merges the gradients of a kernel and of its bias."""
    import keras

    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((12, 12, 3)),
            layers.Conv2D(16, 3),
            layers.Conv2D(24, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.DepthwiseConv2D(3, padding="same"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(10),
        ]
    )


def residual_blocks(communicator: Any) -> Any:
    """Two ways through each block, with collectives in both."""
    import keras

    layers = keras.layers
    x = inputs = keras.Input((8, 8, 4))
    for filters in (8, 16):
        short = centred(communicator)(layers.Conv2D(filters, 1, use_bias=False)(x))
        main = layers.Conv2D(filters, 3, padding="same")(x)
        main = layers.ReLU()(centred(communicator)(main))
        main = centred(communicator)(layers.Conv2D(filters, 3, padding="same")(main))
        x = layers.ReLU()(layers.Add()([short, main]))
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def attention(_: Any) -> Any:
    """Layer normalisation, softmax, dropout and embeddings."""
    import keras

    layers = keras.layers
    inputs = keras.Input((12, 8))
    x = layers.MultiHeadAttention(2, 4, dropout=0.1)(inputs, inputs)
    x = layers.LayerNormalization()(layers.Add()([x, inputs]))
    x = layers.Dense(8)(layers.Dense(16, "gelu")(x))
    return keras.Model(inputs, layers.Dense(10)(layers.Flatten()(x)))


def recurrent(_: Any) -> Any:
    """Loops, whose gradients are loops."""
    import keras

    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((6, 4)),
            layers.Bidirectional(layers.LSTM(8, return_sequences=True)),
            layers.GRU(8),
            layers.Dense(10),
        ]
    )


MODELS = [convolutions, residual_blocks, attention, recurrent]


def centred(communicator: Any) -> Any:
    """A layer that takes the mean over all ranks away, as a normalisation does."""
    import keras
    import tensorflow as tf

    class Centred(keras.layers.Layer):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            mean = tf.reduce_mean(x, [0, 1, 2])
            return x - all_reduce(mean, "mean", name="mean", communicator=communicator)

    return Centred()


def step_of(model: Any, alone: gradring.Communicator, recomputed: bool = False) -> Any:
    """A traced step in which every gradient is a bucket; and what to call it with."""
    import tensorflow as tf

    reduce_gradients = GradientReducer(bucket_bytes=1, communicator=alone)
    forward = tf.recompute_grad(model) if recomputed else lambda x: model(x, training=True)

    @tf.function  # type: ignore[untyped-decorator]
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(forward(x) ** 2)
        weights = model.trainable_variables
        return reduce_gradients(tape.gradient(loss, weights), weights)

    x = np.random.default_rng(1).normal(size=(4, *model.input_shape[1:])).astype(np.float32)
    return step.get_concrete_function(tf.TensorSpec(x.shape)), x


def earlier(op: Any) -> list[Any]:
    """The operations that directly precede one."""
    return [*op.control_inputs, *(tensor.op for tensor in op.inputs)]


def reachable(begin: Any, directly: Callable[[Any], list[Any]]) -> set[Any]:
    seen: set[Any] = set()
    to_visit = [begin]
    while to_visit:
        for op in directly(to_visit.pop()):
            if op not in seen:
                seen.add(op)
                to_visit.append(op)
    return seen


def shared_across_starts(operations: list[Any]) -> list[str]:
    """Tensors of the backward pass that an op before a Start takes, and one that waits for it.

    Of a pair of these, an optimizer that merges what shares an input would make a cycle.
    """
    following: dict[Any, list[Any]] = {op: [] for op in operations}
    for op in operations:
        for before in earlier(op):
            following[before].append(op)
    starts = [op for op in operations if op.type == "GradringStart"]
    begin = next(i for i, op in enumerate(operations) if "gradient_tape/" in op.name)
    backward = {op for op in operations[begin:] if op.type != "Const"}
    needed = set().union(*(reachable(start, earlier) for start in starts))
    found = []
    for start in starts:
        before = reachable(start, earlier)
        # What a Wait returns is the program's own way from one operation to the other.
        held = [op for op in following[start] if op.type not in ("GradringStart", "GradringWait")]
        behind = set(held).union(*(reachable(op, lambda op: following[op]) for op in held)) & needed

        def taken(consumers: set[Any]) -> set[str]:
            kinds = ("GradringStart", "GradringGate")
            return {
                tensor.name
                for op in consumers
                if op.type not in kinds
                for tensor in op.inputs
                if tensor.op in backward and tensor.dtype.is_floating
            }

        found += sorted(taken(before) & taken(behind))
    return found


@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
def test_no_two_operations_share_a_gradient_across_a_start(
    build: Any, recomputed: bool, alone: gradring.Communicator
) -> None:
    step, x = step_of(build(alone), alone, recomputed)
    operations = step.graph.get_operations()
    kinds = Counter(op.type for op in operations)
    assert kinds["GradringGate"] >= 3 or recomputed, kinds
    TopologicalSorter({op: earlier(op) for op in operations}).prepare()  # there is no cycle
    assert shared_across_starts(operations) == []
    assert all(np.isfinite(gradient).all() for gradient in step(x))


@pytest.mark.parametrize("first_reduced", [True, False], ids=["one by one", "both first"])
def test_a_step_with_two_tapes_has_gates_in_both_backward_passes(
    first_reduced: bool, alone: gradring.Communicator
) -> None:
    """Like a GAN, whose second loss goes through the network that the first one has trained."""
    import tensorflow as tf

    weights = [[tf.Variable(tf.ones([8, 8]) / 8.0) for _ in range(4)] for _ in range(2)]
    reduce_gradients = GradientReducer(bucket_bytes=1, communicator=alone)

    def through(x: Any, layers: Any) -> Any:
        for layer in layers:
            x = tf.nn.relu(x @ layer)
        return x

    def step(x: Any, reduce: Callable[[Any], Any]) -> Any:
        both = []
        for trained in weights:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(through(through(x, weights[1]), weights[0]))
            gradients = tape.gradient(loss, trained)
            if first_reduced:
                gradients = reduce(gradients)
                for weight, gradient in zip(trained, gradients, strict=True):
                    weight.assign_sub(0.1 * gradient)
            both.append(gradients)
        return both if first_reduced else [reduce(each) for each in both]

    x = tf.constant(np.random.default_rng(2).normal(size=(4, 8)).astype("f"))
    before = [[weight.numpy() for weight in each] for each in weights]
    right = step(x, list)
    for each, values in zip(weights, before, strict=True):
        for weight, value in zip(each, values, strict=True):
            weight.assign(value)
    traced = tf.function(lambda x: step(x, reduce_gradients)).get_concrete_function(x)
    operations = traced.graph.get_operations()
    TopologicalSorter({op: earlier(op) for op in operations}).prepare()  # there is no cycle
    gates = [op for op in operations if op.type == "GradringGate"]
    gated = {gate.inputs[0].op.name.partition("/")[0] for gate in gates}
    assert gated == {"gradient_tape"}, "a gate holds back the forward pass"
    taken = [op for op in operations for tensor in op.inputs if tensor.op.type == "GradringGate"]
    for passed in (gates[: len(gates) // 2], gates[len(gates) // 2 :]):
        assert {op.outputs[0].name for op in passed} & {t.name for op in taken for t in op.inputs}
    assert len(gates) >= 4
    for own, others in zip(traced(x), right, strict=True):
        for gradient, other in zip(own, others, strict=True):
            np.testing.assert_allclose(gradient, other, rtol=1e-6)


def test_an_edge_between_two_gradients_of_one_layer_is_found(
    alone: gradring.Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def edge_instead(op: Any, index: int, gate: Any) -> None:
        op._add_control_input(gate.op.inputs[1].op)

    monkeypatch.setattr(compat, "replace_input", edge_instead)
    step, _ = step_of(convolutions(alone), alone)
    assert shared_across_starts(step.graph.get_operations()) != []


def test_values_of_two_dtypes_that_have_side_effects_are_reduced_together(
    alone: gradring.Communicator,
) -> None:
    import tensorflow as tf

    counter = tf.Variable(0, dtype=tf.int64)

    @tf.function  # type: ignore[untyped-decorator]
    def step(x: Any) -> Any:
        loss = tf.reduce_sum(x) * (1.0 + tf.cast(counter, tf.float32))
        counter.assign_add(1)
        seen = tf.py_function(lambda: 2.0, [], tf.float32)
        again = tf.py_function(lambda: 3, [], tf.int32)
        first = all_reduce({"loss": loss, "step": counter.read_value()}, communicator=alone)
        last = all_reduce([first["step"], seen, first["loss"], again], communicator=alone)
        return first, last

    for count in (1, 2):
        first, last = step(tf.constant([1.0, 2.0]))
        assert (float(first["loss"]), int(first["step"])) == (3.0 * count, count)
        assert [float(value) for value in last] == [count, 2.0, 3.0 * count, 3.0]


def test_the_reduction_waits_for_what_it_is_told_to_wait_for(alone: gradring.Communicator) -> None:
    import tensorflow as tf

    weights = [tf.Variable(tf.ones([8, 8])) for _ in range(4)]
    reduce_gradients = GradientReducer(bucket_bytes=1, communicator=alone)

    @tf.function  # type: ignore[untyped-decorator]
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            for weight in weights:
                x = tf.nn.relu(x @ weight)
            loss = tf.reduce_mean(x)
        gradients = tape.gradient(loss, weights)
        with tf.control_dependencies(gradients):
            return reduce_gradients(gradients, weights)

    assert all(np.isfinite(gradient).all() for gradient in step(tf.ones([2, 8])))


def test_a_function_that_tensorflow_refuses_is_traced_again_without_the_order(
    alone: gradring.Communicator,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    import tensorflow as tf

    weights = [tf.Variable(tf.ones([8, 8])) for _ in range(4)]
    reduce_gradients = GradientReducer(bucket_bytes=1, communicator=alone)
    traced = []

    @tf.function  # type: ignore[untyped-decorator]
    def step(x: Any) -> Any:
        traced.append(refused_graphs.is_tracing_again())
        with tf.GradientTape() as tape:
            for weight in weights:
                x = tf.nn.relu(x @ weight)
            loss = tf.reduce_mean(x)
        return reduce_gradients(tape.gradient(loss, weights), weights)

    replace = compat.replace_input

    def with_a_cycle(op: Any, index: int, gate: Any) -> None:
        gate.op.inputs[0].op._add_control_input(gate.op)
        replace(op, index, gate)

    with monkeypatch.context() as patched:
        patched.setattr(compat, "replace_input", with_a_cycle)
        with caplog.at_level(logging.WARNING, "gradring"):
            gradients = step(tf.ones([2, 8]))
    (line,) = [record.message for record in caplog.records if "refuses" in record.message]
    assert "from the operation 'gradient_tape/" in line and "in a cycle" in line
    np.testing.assert_allclose(gradients[-1], np.full([8, 8], 8.0**3 / 8))
    again = step(tf.ones([2, 8]))
    assert traced == [False, True]
    for first, second in zip(gradients, again, strict=True):
        np.testing.assert_array_equal(first, second)


def test_an_error_of_the_program_is_not_taken_for_a_refusal(alone: gradring.Communicator) -> None:
    import tensorflow as tf

    weights = [tf.Variable(tf.ones([2, 2])) for _ in range(3)]
    reduce_gradients = GradientReducer(bucket_bytes=1, communicator=alone)
    calls = []

    @tf.function  # type: ignore[untyped-decorator]
    def step(x: Any) -> Any:
        calls.append(x)
        with tf.GradientTape() as tape:
            for weight in weights:
                x = x @ weight
            tf.debugging.assert_less(tf.reduce_sum(x), 0.0, "4 nodes in a cycle")
        return reduce_gradients(tape.gradient(x, weights), weights)

    with pytest.raises(tf.errors.InvalidArgumentError, match="4 nodes in a cycle"):
        step(tf.ones([2, 2]))
    assert len(calls) == 1


def test_functions_called_in_converted_code_are_still_converted(
    alone: gradring.Communicator,
) -> None:
    import tensorflow as tf

    step, x = step_of(convolutions(alone), alone)  # TensorFlow's functions are watched now
    step(x)

    @tf.function  # type: ignore[untyped-decorator]
    def inner(value: Any) -> Any:
        if value > 0:
            value = -value
        return value

    @tf.function  # type: ignore[untyped-decorator]
    def outer(value: Any) -> Any:
        if value > 1:
            value = inner(value)
        return inner(value)

    assert float(outer(tf.constant(3.0))) == -3.0
