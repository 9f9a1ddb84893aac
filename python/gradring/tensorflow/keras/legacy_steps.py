"""Losses and metrics in steps of `tf_keras`, and its custom loops, if ranks divide the batches.

`tf_keras` computes a loss of its replica's samples only. A strategy cannot correct that as in Keras
3, so rank 0 names losses and metrics that parts of a batch do not give.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from gradring.errors import ConfigError
from gradring.tensorflow.graph import once, replica_step
from gradring.tensorflow.graph.adoption import communicator_of, replicas_of
from gradring.tensorflow.graph.expressions import is_in_graph
from gradring.tensorflow.graph.extent import extent_in_step
from gradring.tensorflow.graph.extent_rules import UNKNOWN, Extent
from gradring.tensorflow.graph.fallback import falls_back
from gradring.tensorflow.keras import inseparable_losses, summed_losses
from gradring.tensorflow.keras.inseparable_losses import problem_of

#: Reductions of `tf_keras` that divide by the number of replicas.
_MEANS = ("auto", "sum_over_batch_size")


@contextlib.contextmanager
def batch_of(step: Callable[..., Any], args: Sequence[Any]) -> Iterator[None]:
    """Notes the tensors of a batch, inside the block, if the step is one of `tf_keras`."""
    if not str(getattr(step, "__module__", "")).startswith("tf_keras."):
        yield
        return
    leaves = [leaf for leaf in tf.nest.flatten(args) if isinstance(leaf, tf.Tensor)]
    with replica_step.holding(batch=[leaf for leaf in leaves if leaf.shape.rank]):
        yield


def loss(original: Callable[..., Any], legacy: Any, *args: Any, **kwargs: Any) -> tf.Tensor:
    """Stands in for `__call__` of a loss; names what parts of a batch do not give.

    In a program that knows of no replicas, a sum over samples stays a sum: it is multiplied by the
    number of replicas, by which `tf_keras` divides it.
    """
    value = original(legacy, *args, **kwargs)
    inseparable_losses.check([value], replica_step.current().batch)
    if not summed_losses.warns() or legacy.reduction not in _MEANS:
        return value
    if not _extent(value).is_sum or value.shape.rank != 0:
        return value
    whole = value * replicas_of(tf.distribute.get_strategy())
    replica_step.current().means.append(whole)
    return whole


def update_mean(
    original: Callable[..., Any], metric: Any, values: Any, *args: Any, **kwargs: Any
) -> Any:
    """Stands in for `update_state` of means; names values that parts of a batch do not give."""
    _check(metric, values)
    return original(metric, values, *args, **kwargs)


@falls_back("the look for metrics that parts of a batch cannot give", "nothing is said of them")
def _check(metric: Any, values: Any) -> None:
    strategy = tf.distribute.get_strategy()
    communicator = communicator_of(strategy)
    if communicator is None or replicas_of(strategy) == 1 or not is_in_graph(values):
        return
    extent = _extent(values)
    is_wrong = extent.is_weighted or extent.is_curved or extent.is_sum
    problem = problem_of(values, extent) or "is a sum over samples"
    if values.shape.rank or not is_wrong or once.has_warned(problem):
        return
    once.warn(
        communicator,
        f"metric {metric.name}",
        "a value of the metric %r %s; its log is the mean of the ranks' values, which may not be "
        "that of one process",
        metric.name,
        problem,
    )


def _extent(value: Any) -> Extent:
    return extent_in_step(value) if replica_step.current().batch else UNKNOWN


def trains_outside(_: Any) -> bool:
    """Returns whether a program that knows of no replicas computes gradients in its own loop."""
    is_given = summed_losses.warns() and tf.distribute.in_cross_replica_context()
    return is_given and replicas_of(tf.distribute.get_strategy()) > 1


def refuse_loop(
    original: Callable[..., Any], tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any
) -> Any:
    """Stands in for `GradientTape.gradient` where `trains_outside`.

    Raises:
        gradring.errors.ConfigError: A source is a variable.
    """
    if not any(hasattr(source, "assign") for source in tf.nest.flatten(sources)):
        return original(tape, target, sources, *args, **kwargs)
    communicator = communicator_of(tf.distribute.get_strategy())
    assert communicator is not None, "the strategy is gradring's"
    rank, host = communicator.rank, communicator.host
    raise ConfigError(
        f"rank {rank} of {host} computes gradients outside of fit, and --with-strategy divides "
        "batches of tf_keras in fit only: train by fit or train_on_batch, or call the step by the "
        "run of a CustomCollectiveStrategy, without --with-strategy (GRADRING_WITH_STRATEGY)",
        rank=rank,
        host=host,
    )
