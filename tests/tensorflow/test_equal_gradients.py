"""Ranks that all compute the same gradients are told so, and others are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradring.testing import run_ranks
from support.log_lines import kept_lines
from support.tf_worker import join
from support.waiting import wait_until

SAYS = "equal gradients in 5 steps"
STEPS = 8
EQUAL = ("whole", "whole, in a graph", "whole, in a strategy", "whole, with Horovod's names")
UNEQUAL = ("divided", "divided by a strategy", "zeros", "unlike at last", "no gradients")


def train() -> dict[str, list[str]]:
    """What rank 0's log says of each way to train; each has a group of its own."""
    import keras
    import tensorflow as tf

    import gradring.horovod.tensorflow as hvd
    from gradring.tensorflow import CustomCollectiveStrategy, GradientReducer, all_reduce

    world = join()
    said = kept_lines()
    samples = tf.data.Dataset.range(8 * STEPS).map(lambda i: tf.sin(tf.cast(i, tf.float32)))

    def loss_of(weights: Any, batch: Any) -> Any:
        return tf.reduce_sum((weights[0] * batch[:, None] + weights[1] - 1.0) ** 2)

    def with_reducer(comm: Any, data: Any, wrap: Callable[[Any], Any] = lambda run: run) -> None:
        weights = [tf.Variable([1.0, 2.0]), tf.Variable(0.5)]
        reducer = GradientReducer("sum", communicator=comm)

        def step(batch: Any) -> None:
            with tf.GradientTape() as tape:
                loss = loss_of(weights, batch)
            for weight, gradient in zip(
                weights, reducer(tape.gradient(loss, weights), weights), strict=True
            ):
                weight.assign_sub(0.01 * gradient)

        run = wrap(step)
        for batch in data:
            run(batch)

    def with_strategy(comm: Any, is_divided: bool) -> None:
        strategy = CustomCollectiveStrategy(communicator=comm)
        with strategy.scope():
            weights = [keras.Variable([1.0, 2.0]), keras.Variable(0.5)]
            optimizer = keras.optimizers.SGD(0.01)

        def replica_step(batch: Any) -> None:
            with tf.GradientTape() as tape:
                loss = loss_of(weights, batch)
            optimizer.apply(tape.gradient(loss, weights), weights)

        step = tf.function(lambda batch: strategy.run(replica_step, (batch,)))
        data = samples.batch(8)
        for batch in strategy.experimental_distribute_dataset(data) if is_divided else data:
            step(batch)

    def with_horovod(_: Any) -> None:
        hvd.init()
        weights = [tf.Variable([1.0, 2.0]), tf.Variable(0.5)]
        for batch in samples.batch(8):
            with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
                loss = loss_of(weights, batch)
            tape.gradient(loss, weights)

    def of_constants(comm: Any, *gradients: Any) -> None:
        reducer = GradientReducer(communicator=comm)
        for gradient in gradients:
            reducer([gradient])

    def without_gradients(comm: Any) -> None:
        for _ in range(STEPS):
            all_reduce(tf.ones([3]), "mean", communicator=comm)

    part = samples.shard(world.world_size, world.rank).batch(4)
    unlike = tf.fill([3], 1.0 + world.rank)
    ways: dict[str, Callable[[Any], None]] = {
        "divided": lambda comm: with_reducer(comm, part),
        "divided by a strategy": lambda comm: with_strategy(comm, is_divided=True),
        "zeros": lambda comm: of_constants(comm, *[tf.zeros([3])] * STEPS),
        "unlike at last": lambda comm: of_constants(
            comm, *[tf.ones([3])] * 4, unlike, *[unlike] * 9
        ),
        "no gradients": without_gradients,
        "whole": lambda comm: with_reducer(comm, samples.batch(8)),
        "whole, in a graph": lambda comm: with_reducer(comm, samples.batch(8), tf.function),
        "whole, in a strategy": lambda comm: with_strategy(comm, is_divided=False),
        "whole, with Horovod's names": with_horovod,
    }
    assert tuple(ways) == UNEQUAL + EQUAL
    found = {}
    for way, run in ways.items():
        said.clear()
        run(world.split(0))
        if way in EQUAL and world.rank == 0:
            wait_until(lambda: any(SAYS in line for line in said), way)
        world.barrier()
        found[way] = [line for line in said if SAYS in line]
    return found


def test_ranks_with_equal_gradients_are_told_once() -> None:
    of_chief, of_other = run_ranks(train, 2, timeout=120)
    assert {way: len(lines) for way, lines in of_chief.items()} == {
        **dict.fromkeys(UNEQUAL, 0),
        **dict.fromkeys(EQUAL, 1),
    }
    assert not any(of_other.values())
    for way in EQUAL:
        (line,) = of_chief[way]
        assert line.startswith("rank 0 on ") and "all 2 ranks had" in line
        assert "experimental_distribute_dataset" in line and "dataset.shard" in line
