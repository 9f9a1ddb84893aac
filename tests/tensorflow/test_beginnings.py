"""Ranks that begin to train with different weights are told so, and others are not."""

from __future__ import annotations

from typing import Any

import pytest

from gradring.errors import ConfigError
from gradring.testing import run_ranks
from support.log_lines import kept_lines
from support.tf_worker import join

IN_THE_STEP = ("in the step", "unlike in the step")
WAYS = ("eager", "graph", "broadcast", "names", *IN_THE_STEP, "strategy", "outside")
SAYS = "begins to train with weights that differ from the other ranks'"


def begin() -> dict[str, list[str]]:
    """What the log says of the first two steps of each way to train."""
    import tensorflow as tf

    from gradring.tensorflow import CustomCollectiveStrategy, GradientReducer, broadcast_variables

    comm = join()
    said = kept_lines()

    def of_reducer(way: str) -> None:
        own = [tf.Variable([1.0 + comm.rank, 2.0]), tf.Variable(3.0)]
        if way == "broadcast":
            broadcast_variables(own, communicator=comm)
        reducer = GradientReducer(communicator=comm)

        def step(made: Any = own) -> None:
            reducer([tf.ones([2]), tf.ones([])], ["w", "b"] if way == "names" else made)

        lazily: list[Any] = []

        def with_variables_of_its_own() -> None:
            if not lazily:
                first = 1.0 if way == "in the step" else 1.0 + comm.rank
                lazily.extend((tf.Variable([first, 2.0]), tf.Variable(3.0)))
            step(lazily)

        run = with_variables_of_its_own if way in IN_THE_STEP else step
        run = run if way == "eager" else tf.function(run)
        run()
        run()

    def of_strategy(way: str) -> None:
        import keras

        strategy = CustomCollectiveStrategy(communicator=comm)
        keras.utils.set_random_seed(comm.rank)
        with strategy.scope() if way == "strategy" else tf.init_scope():
            layer = keras.layers.Dense(1)
            layer.build((None, 2))
            optimizer = keras.optimizers.SGD(0.1)

        def replica_step() -> None:
            ones = [tf.ones_like(variable) for variable in layer.trainable_variables]
            optimizer.apply(ones, layer.trainable_variables)

        if way == "strategy":
            strategy.run(replica_step)
            strategy.run(replica_step)
        else:
            with pytest.raises(ConfigError, match=r"such as dense.*/kernel, were made outside"):
                strategy.run(replica_step)

    found = {}
    for way in WAYS:
        said.clear()
        (of_strategy if way in WAYS[-2:] else of_reducer)(way)
        found[way] = [*said]
    return found


def test_ranks_that_begin_with_other_weights_are_told_once() -> None:
    for rank, said in enumerate(run_ranks(begin, 2)):
        told = {way: [line for line in said[way] if SAYS in line] for way in WAYS}
        unlike = ("eager", "graph", "unlike in the step")
        assert {way: len(told[way]) for way in WAYS} == {way: int(way in unlike) for way in WAYS}
        for line in [line for way in unlike for line in told[way]]:
            assert line.startswith(f"rank {rank} of 2") and "broadcast_variables" in line
