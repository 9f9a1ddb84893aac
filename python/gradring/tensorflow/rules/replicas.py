"""`sync_replicas`, and the search for the update rule of given variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from gradring.tensorflow.graph.adoption import communicator_of, strategy_of
from gradring.tensorflow.graph.model_variables import variables_of
from gradring.tensorflow.rules.updates import Updates, updates_of, updates_of_optimizers


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def sync_replicas(model: tf.keras.Model | tf.train.Checkpoint | tf.Module) -> None:
    """Makes the ranks' replicas equal, if the strategy's update rule lets them differ.

    Every rank must call it after the same step, eagerly or inside the same `tf.function`, and not
    in `strategy.run`. `gradring.updates.LocalSGD` ends its round early and averages the variables,
    as after the round's last step. `Primary` gives every rank the state of the chief's optimizer.
    `AllReduce` has nothing to do, and neither has any rule just after another call.

    `fit` calls it at the end of every epoch. Keras' `evaluate` and `predict`, `save`,
    `check_replicas` and the commits of an `elastic.State` call it first. A custom loop should call
    it before it reads the model in any other way.

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
    """Makes the replicas of variables equal, by the rule of their strategy."""
    rule_of(variables).sync(variables)


def sync_model(model: Any) -> None:
    """Makes the replicas of a Keras model equal; costs nothing under the default rule."""
    rule = updates_of(model.distribute_strategy)
    if type(rule) is not Updates:
        rule.sync(list(variables_of(model)))


def rule_of(variables: Sequence[Any]) -> Updates:
    """Returns the rule of the first variable that belongs to a strategy of ours.

    If there is none, returns the rules of optimizers outside of strategies.
    """
    strategies = (strategy_of([variable]) for variable in variables)
    ours = (strategy for strategy in strategies if communicator_of(strategy) is not None)
    strategy = next(ours, None)
    return updates_of_optimizers() if strategy is None else updates_of(strategy)
