"""Overlap of communication and computation, and how that is measured."""

from collections.abc import Iterator
from typing import Any

import pytest
from graph_order import before

import gradring
from gradring.tensorflow import GradientReducer, Overlap, measure_overlap

LAYERS = 4


@pytest.fixture(scope="module")
def alone() -> Iterator[gradring.Communicator]:
    with gradring.Communicator(0, 1) as communicator:
        yield communicator


@pytest.fixture(scope="module")
def step(alone: gradring.Communicator) -> Any:
    """A compiled step of an MLP whose gradients have a bucket each."""
    import tensorflow as tf

    weights = [tf.Variable(tf.ones([8, 8]), name=f"kernel_{i}") for i in range(LAYERS)]
    reduce_gradients = GradientReducer(bucket_bytes=1, communicator=alone)

    @tf.function  # type: ignore[untyped-decorator]
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            for weight in weights:
                x = tf.nn.relu(x @ weight)
            loss = tf.reduce_mean(x)
        return reduce_gradients(tape.gradient(loss, weights), weights)

    return step.get_concrete_function(tf.TensorSpec([None, 8]))


def test_a_bucket_starts_before_the_gradients_of_earlier_layers_are_computed(step: Any) -> None:
    starts = [op for op in step.graph.get_operations() if op.type == "GradringStart"]
    gradients = [start.inputs[1].op.name for start in starts]
    assert len(set(gradients)) == LAYERS
    for number, start in enumerate(starts):
        assert f"kernel_{LAYERS - 1 - number}" in start.get_attr("label").decode()
        assert not before(start) & set(gradients[number + 1 :])


def test_a_bucket_starts_before_the_backward_pass_works_on_earlier_layers(step: Any) -> None:
    starts = {op.name for op in step.graph.get_operations() if op.type == "GradringStart"}
    relus = [op for op in step.graph.get_operations() if op.type == "ReluGrad"]
    assert len(relus) == LAYERS
    # The gradient of the last layer's activation belongs to no earlier bucket.
    assert sorted(len(before(relu) & starts) for relu in relus) == list(range(LAYERS))


def test_every_wait_comes_after_every_start(step: Any) -> None:
    operations = step.graph.get_operations()
    starts = {op.name for op in operations if op.type == "GradringStart"}
    waits = [op for op in operations if op.type == "GradringWait"]
    assert len(waits) == LAYERS
    assert all(starts <= before(wait) for wait in waits)


def test_where_nothing_is_communicated_everything_is_hidden(alone: gradring.Communicator) -> None:
    with measure_overlap(alone) as overlap:
        pass
    assert overlap == Overlap()
    assert overlap.hidden_share == 1.0


def test_the_share_is_of_the_time_in_collectives() -> None:
    overlap = Overlap(communication_s=1.5, waiting_s=0.5, exposed_s=0.5)
    assert overlap.hidden_s == 1.5
    assert str(overlap) == (
        "75% of 2.000 s in collectives hidden (0.500 s of it waiting for peers), 0.500 s exposed"
    )
    assert Overlap(communication_s=1.0, exposed_s=3.0).hidden_share == 0.0
