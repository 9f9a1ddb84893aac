"""Finding the rule by which variables are updated, to make their replicas equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from gradring.tensorflow.graph.adoption import communicator_of, strategy_of
from gradring.tensorflow.graph.model_variables import variables_of
from gradring.tensorflow.rules.updates import Updates, updates_of


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def sync_replicas(model: tf.keras.Model | tf.train.Checkpoint | tf.Module) -> None:
    """Makes the ranks' replicas equal, where the strategy's update rule lets them differ.

    Every rank must call it, after the same step, eagerly or inside the same `tf.function`, and not
    in `strategy.run`. With `gradring.updates.LocalSGD` it ends the round early: the variables are
    averaged, as after its last step. With `Primary` it gives every rank the state of the chief's
    optimizer. With `AllReduce`, or just after another call, there is nothing to do.

    `fit` does it at the end of every epoch; `evaluate` and `predict` of Keras, `save`,
    `check_replicas` and the commits of an `elastic.State` do it first. A custom loop should do it
    before it looks at the model otherwise.

    Args:
        model: A Keras model, or a checkpoint or module that has the model, or its optimizer.

    Raises:
        gradring.errors.GradringError: As for `all_reduce`.

    Examples:
        >>> rule = gradring.updates.LocalSGD(every=16)
        >>> strategy = gradring.tensorflow.CustomCollectiveStrategy(update=rule)
        >>> with strategy.scope():
        ...     weight, optimizer = tf.Variable(0.0), keras.optimizers.SGD(1.0)
        >>> def replica_step():
        ...     optimizer.apply_gradients([(tf.constant(1.0 + rank) / 2, weight)])
        >>> strategy.run(replica_step)
        >>> weight.numpy().item()  # rank 1 has -2
        -1.0
        >>> gradring.tensorflow.sync_replicas(tf.train.Checkpoint(weight=weight))
        >>> weight.numpy().item()
        -1.5
    """
    sync(list(variables_of(model)))


def sync(variables: Sequence[Any]) -> None:
    """`sync_replicas`, by variables."""
    rule_of(variables).sync(variables)


def sync_model(model: Any) -> None:
    """`sync_replicas` for a Keras model of a strategy."""
    rule = updates_of(model.distribute_strategy)
    if type(rule) is not Updates:
        rule.sync(list(variables_of(model)))


def rule_of(variables: Sequence[Any]) -> Updates:
    """The rule of the first variable of a strategy of ours."""
    strategies = (strategy_of([variable]) for variable in variables)
    ours = (strategy for strategy in strategies if communicator_of(strategy) is not None)
    return updates_of(next(ours, None))
