"""Metrics of models that `given` lets train together, which count the samples of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import tensorflow as tf

from gradring.tensorflow.graph import once
from gradring.tensorflow.graph.expressions import is_in_graph
from gradring.tensorflow.graph.extent import extent_in_step
from gradring.tensorflow.keras import given
from gradring.tensorflow.keras.given_losses import (
    are_of_whole_batch,
    part_of_terms,
    sum_of_samples,
)
from gradring.tensorflow.keras.inseparable_losses import problem_of
from gradring.tensorflow.keras.metric_logs import aggregation_of
from gradring.tensorflow.seams import keras_names


def whole_value(values: tf.Tensor, metric: Any, weight: Any = None) -> tf.Tensor:
    """Scales the argument of a mean metric, if it is a sum over this rank's samples.

    Warns on rank 0 of values that parts of a batch do not give.

    Args:
        values: A scalar, a value for each column, or values of each sample.
        metric: The metric.
        weight: The weight of the values, or None.
    """
    if not is_in_graph(values):
        return values
    extent = extent_in_step(values)
    if not are_of_whole_batch(values):
        _warn_of_metric(metric, problem_of(values, extent) if extent.is_paired else None)
        return values
    if not values.dtype.is_floating:
        return values
    if extent.is_sum and not extent.is_weighted:
        return sum_of_samples(values)
    if is_in_graph(weight) and (of_weight := extent_in_step(weight)).degree == 1:
        if of_weight.of_data:
            return values  # its divisor, if the program adds up a mean over unmasked steps
        weight = None
    part = part_of_terms(values) if weight is None else None
    if part is not None:
        return part
    _warn_of_metric(metric, problem_of(values, extent))
    return values


def _warn_of_metric(metric: Any, problem: str | None) -> None:
    """Warns on rank 0 of a metric whose values of parts of a batch do not give that of the whole.

    A metric that shows a loss is not named if the loss has been.
    """
    if problem is None or once.has_warned(problem):
        return
    given.warn_once(
        f"metric {metric.name}",
        "a value of the metric %r %s; its log is the mean of the ranks' values, which may not be "
        "that of one process (GRADRING_WITH_STRATEGY). Add up its parts in a keras.metrics.Metric",
        metric.name,
        problem,
    )


def logs_of_epoch(original: Callable[..., Any], model: Any, logs: Any) -> Any:
    """Reads metrics that have counted the samples of all ranks.

    The metrics keep these numbers until the next step, for a program that asks for their results.
    """
    take_whole_values(model)
    return original(model, logs)


def logs_of_batch(model: Any, batches: Any, logs: Any) -> Any:
    """Returns the logs of `train_on_batch` and `test_on_batch`, read as those of an epoch.

    A mean of the ranks' results is wrong, unless all of their batches so far had as many samples.
    """
    if given.are_of_loop(batches):
        return logs
    return keras_names.LOGS_OF_EPOCH.of(model)(logs)


class _Whole(NamedTuple):
    """A metric's variable that has the value of all ranks, such as a sum of their own."""

    variable: Any
    own: Any
    whole: Any


#: For each model, the variables that `take_whole_values` changed.
_whole: WeakKeyDictionary[Any, list[_Whole]] = WeakKeyDictionary()


def take_whole_values(model: Any) -> None:
    """Gives a model's metric variables their values over all ranks, by one sum for each dtype.

    `return_own_values` takes them back. Each variable has the aggregation that its metric asks for,
    as under TensorFlow's strategies.
    """
    return_own_values(model)
    communicator = model.distribute_strategy.communicator
    variables = [each for each in model.metrics_variables if aggregation_of(each) != "first"]
    if communicator.world_size == 1 or not variables:
        return
    own = [np.array(tf.convert_to_tensor(each)) for each in variables]
    sums = [each.copy() for each in own]
    for dtype in sorted({each.dtype.name for each in sums}):
        bucket = [each for each in sums if each.dtype.name == dtype]
        communicator.all_reduce(bucket, "sum", name=f"metrics of {dtype}")
    for variable, value in zip(variables, sums, strict=True):
        if aggregation_of(variable) == "mean":
            value[...] = value / communicator.world_size
        variable.assign(value)
    _whole[model] = list(map(_Whole, variables, own, sums))


def return_own_values(model: Any) -> None:
    """Gives metric variables the values of this rank again, unless they have been reset since."""
    for variable, own, whole in _whole.pop(model, ()):
        if np.array_equal(tf.convert_to_tensor(variable), whole, equal_nan=whole.dtype.kind == "f"):
            variable.assign(own)
