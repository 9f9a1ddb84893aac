"""Metrics of models that `given` lets train together, which count the samples of all ranks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import tensorflow as tf

from gradring.tensorflow.graph.extent import is_in_graph, reads
from gradring.tensorflow.keras import given
from gradring.tensorflow.keras.given_losses import extent_in_step, sum_of_samples
from gradring.tensorflow.keras.inseparable_losses import problem_of
from gradring.tensorflow.seams import keras_names


def whole_value(values: tf.Tensor, metric: Any) -> tf.Tensor:
    """Scales the argument of a mean metric, if it is a sum over this rank's samples.

    Warns on rank 0 of values that parts of a batch do not give.

    Args:
        values: A scalar, or a value for each sample.
        metric: The metric.
    """
    if not is_in_graph(values):
        return values
    extent = extent_in_step(values)
    if values.shape.rank != 0:
        _warn_of_metric(metric, problem_of(values, extent) if extent.is_paired else None)
        return values
    if not values.dtype.is_floating:
        return values
    if extent.is_sum and not extent.is_weighted:
        return sum_of_samples(values)
    _warn_of_metric(metric, problem_of(values, extent))
    return values


def _warn_of_metric(metric: Any, problem: str | None) -> None:
    """Warns on rank 0 of a metric whose values of parts of a batch do not give that of the whole.

    A metric that shows a loss is not named if the loss has been.
    """
    if problem is None or given.has_warned(problem):
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

    A `train_step` of the program may return metrics that Keras does not read here, such as
    "compile_metrics"; their logs are replaced as well.
    """
    with whole_metrics(model):
        found = original(model, logs)
        if isinstance(found, dict):
            of_metrics = _names_of_metrics.get(model, ())
            whole = {m.name: m.result() for m in model.metrics if m.name in of_metrics}
            found = {**found, **{name: log for name, log in whole.items() if name in found}}
        # A metric may return its variable, which holds this rank's value again after the block.
        return tf.nest.map_structure(
            lambda log: tf.convert_to_tensor(log) if hasattr(log, "assign") else log, found
        )


#: For each model, names of the logs that its step reads from metrics.
_names_of_metrics: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()


def note_metrics(model: Any, logs: Any) -> None:
    """Notes which of a step's logs are results of the model's metrics."""
    if not isinstance(logs, dict):
        return
    for metric in model.metrics:
        own = [getattr(variable, "value", variable) for variable in metric.variables]
        handles = [variable.handle for variable in own if hasattr(variable, "handle")]
        leaves = tf.nest.flatten(logs.get(metric.name))
        if any(reads(leaf, handles) for leaf in leaves):
            _names_of_metrics.setdefault(model, set()).add(metric.name)


def logs_of_batch(model: Any, batches: Any, logs: Any) -> Any:
    """Returns the logs of `train_on_batch` and `test_on_batch`.

    Metrics other than means are read again over all ranks: a mean of the ranks' results is wrong.
    """
    if given.are_of_loop(batches) or not _has_other_metrics(model):
        return logs
    return keras_names.LOGS_OF_EPOCH.of(model)(logs)


@contextlib.contextmanager
def whole_metrics(model: Any) -> Iterator[None]:
    """Gives a model's metric variables, inside the block, their sums over all ranks."""
    communicator = model.distribute_strategy.communicator
    variables = list(model.metrics_variables)
    own = [np.array(tf.convert_to_tensor(each)) for each in variables]
    if communicator.world_size == 1 or not own:
        yield
        return
    sums = [each.copy() for each in own]
    for dtype in sorted({each.dtype.name for each in sums}):
        bucket = [each for each in sums if each.dtype.name == dtype]
        communicator.all_reduce(bucket, "sum", name=f"metrics of {dtype}")
    for variable, value in zip(variables, sums, strict=True):
        variable.assign(value)
    try:
        yield
    finally:
        for variable, value in zip(variables, own, strict=True):
            variable.assign(value)


def _has_other_metrics(model: Any) -> bool:
    """Returns whether a model has a metric whose result is no mean, such as the root of one."""
    keras: Any = sys.modules["keras"]
    metrics = [inner for each in model.metrics for inner in getattr(each, "metrics", [each])]
    mean = keras.metrics.Mean.result
    return not all(getattr(type(each), "result", None) is mean for each in metrics)
