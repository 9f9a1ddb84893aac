"""Each replica's share of the samples of a step, by which `fit` weighs its loss.

Keras takes the mean over each replica's samples, divides the means by the number of replicas, and
adds them up. The result is the mean over all samples only if all replicas have equally many. The
gradient of a replica's mean is therefore multiplied by the replica's share, relative to an equal
share. The loss's value is not multiplied, because logs are weighed by samples separately.

The total number of samples costs no extra message: the replicas exchange it together with the flag
whether they have any samples.

Not every mean is over samples: Keras may divide by the number of unmasked steps, or by the sum of
the weights. The gradient is then weighed by the replica's share of this divisor, which takes one
collective for each such loss. The mean's value is multiplied by the divisor's share over the
samples' share, because logs are weighed by the latter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import tensorflow as tf

from gradring.tensorflow.data import counting
from gradring.tensorflow.graph import compat
from gradring.tensorflow.graph.adoption import communicator_of, is_given, replicas_of
from gradring.tensorflow.graph.replica_step import Share, current, holding
from gradring.tensorflow.keras import (
    given,
    given_losses,
    given_metrics,
    global_variables,
    metric_logs,
)
from gradring.tensorflow.keras.empty_batches import first_rows_of, may_come_in, unless
from gradring.tensorflow.rules.updates import updates_of

_SUM = tf.distribute.ReduceOp.SUM


class _Taken:
    """Facts about the last batch taken from a strategy's iterators."""

    def __init__(self) -> None:
        """Begins without any batch."""
        #: Number of samples of all replicas, an int64 scalar.
        self.samples = compat.plain_variable(0, "samples", tf.int64)
        #: True if the batch was taken outside of a graph. Its static shape is then this rank's own;
        #: in a graph, static shapes hold for all batches. Keras 3.16 and later take the batches of
        #: single steps eagerly.
        self.eagerly = False


_taken: WeakKeyDictionary[Any, _Taken] = WeakKeyDictionary()


class OwnBatch(NamedTuple):
    """A batch that no iterator has counted, such as the arguments of `train_on_batch`."""

    data: Any
    #: Number of samples of all ranks, or None if unknown.
    samples: Any = None


def own_batches(strategy: Any, iterator: Any) -> Any:
    """Wraps batches in `OwnBatch`, unless they come from a (distributed) iterator."""
    if given.are_of_loop(iterator):
        return iterator
    if not is_given(strategy):
        return map(OwnBatch, iterator)
    parts = map(given.part_of_batch, iterator)
    # A `tf.function` is not traced again for each value of an array.
    return (OwnBatch(data, None if count is None else np.array(count)) for data, count in parts)


# Counting


def count() -> None:
    """Makes the iterators of our strategies count samples, from now on."""
    counting.count_in_iterators(_count, _note)


def _count(strategy: Any, has_values: tf.Tensor, optionals: list[Any]) -> tf.Tensor | None:
    """Returns the number of replicas with values, a scalar; stores their number of samples."""
    if communicator_of(strategy) is None:
        return None
    own = tf.add_n([_rows_in(optional) for optional in optionals])
    found = _over_ranks(strategy, tf.stack([tf.reshape(has_values, []), own]))
    _assign(strategy, found[1])
    return found[0]


def _note(strategy: Any, batch: Any) -> None:
    """Stores the number of samples of a batch that has a value on every replica."""
    communicator = communicator_of(strategy)
    if communicator is None or replicas_of(strategy) == 1:
        return
    parts = [strategy.experimental_local_results(leaf) for leaf in tf.nest.flatten(batch)]
    found = [first_rows_of(list(replica)) for replica in zip(*parts, strict=True)]
    own = tf.add_n([tf.cast(0 if rows is None else rows, tf.int64) for rows in found])
    if all(isinstance(rows, int) for rows in found) and not tf.executing_eagerly():
        # A static batch size in a graph is the same on all ranks.
        _assign(strategy, own * communicator.world_size)
    else:
        _assign(strategy, _over_ranks(strategy, own))


def _over_ranks(strategy: Any, own: tf.Tensor) -> tf.Tensor:
    """Returns the sum over processes; in a single process, `reduce` refuses plain tensors."""
    is_alone = strategy.communicator.world_size == 1
    return own if is_alone else strategy.reduce(_SUM, own, axis=None)


def _rows_in(optional: Any) -> tf.Tensor:
    """Returns a replica's number of samples, or 0 if it has no batch."""

    def rows() -> tf.Tensor:
        found = first_rows_of(optional.get_value())
        return tf.constant(0, tf.int64) if found is None else tf.cast(found, tf.int64)

    return tf.cond(optional.has_value(), rows, lambda: tf.constant(0, tf.int64))


def _assign(strategy: Any, total: tf.Tensor) -> None:
    taken = _taken_from(strategy)
    taken.eagerly = tf.executing_eagerly()
    with tf.device("/device:CPU:0"):
        # The raw op keeps the variable out of the graph's `variables`. `broadcast_update` would
        # take an assigned one of those for a variable that the function changes.
        tf.raw_ops.AssignVariableOp(resource=taken.samples.handle, value=total)


def _taken_from(strategy: Any) -> _Taken:
    if strategy not in _taken:
        _taken[strategy] = _Taken()
    return _taken[strategy]


# Weighing


def make_function(
    original: Callable[..., Any], model: Any, step_function: Callable[[Any], Any]
) -> Any:
    """Stands in for Keras' function of a loop; weighs the losses of training and test steps."""
    strategy = model.distribute_strategy

    def do(data: Any) -> Any:
        rows = [leaf for leaf in tf.nest.flatten(data) if isinstance(leaf, tf.Tensor)]
        with holding(batch=[leaf for leaf in rows if leaf.shape.rank]):
            logs = step_function(data)
            metric_logs.note(model, logs)
            if not is_given(strategy):
                return logs
            global_variables.check(model)
            return given_losses.whole_logs(logs)

    @functools.wraps(step_function)
    def weighted(data: Any) -> Any:
        if not isinstance(data, OwnBatch):
            if is_given(strategy) and may_come_in(strategy):
                given.require_rows_of_samples(data)
            return weighed_by(None, False, data)
        data, given_total = data
        with holding(has_whole_batch=given_total is None and is_given(strategy)):
            return weighed_by(given_total, True, data)

    def weighed_by(given_total: Any, is_own: bool, data: Any) -> Any:
        own = first_rows_of(data)
        # An elastic job may have another number of replicas when this is traced again.
        if own is None or not may_come_in(strategy):
            return do(data)
        if updates_of(strategy).are_local:
            return do(data) if isinstance(own, int) and own else counted(own, data)
        taken = _taken_from(strategy)
        has_equal_shapes = not (tf.executing_eagerly() or taken.eagerly or is_own)
        if isinstance(own, int) and has_equal_shapes:
            with holding(share=Share(tf.ones([], tf.float64), True, True)):
                return do(data)
        own = tf.cast(own, tf.int64)
        if given_total is not None:
            total = given_total
        elif is_own:
            total = tf.distribute.get_replica_context().all_reduce(_SUM, own)
        else:
            total = taken.samples.read_value()
        share = Share(_share(own, total), False, has_equal_shapes)
        if is_given(strategy):
            given_losses.note_share(share)
        with holding(share=share):
            logs = counted(own, data)
        # Each replica's logs become its part of a mean over replicas.
        return tf.nest.map_structure(functools.partial(_part, share.ratio), logs)

    def counted(own: Any, data: Any) -> Any:
        # The mean over no samples is NaN, so an empty batch must not change the metrics.
        return unless(tf.equal(own, 0), model.metrics_variables, lambda: do(data))

    return original(model, weighted)


def _share(own: tf.Tensor, total: tf.Tensor) -> tf.Tensor:
    """Returns a replica's share of a total, relative to an equal share: 1.0 is equal."""
    count = tf.cast(replicas_of(tf.distribute.get_strategy()), tf.float64)
    return tf.math.divide_no_nan(tf.cast(own, tf.float64) * count, tf.cast(total, tf.float64))


def _part(share: tf.Tensor, log: Any) -> Any:
    if not isinstance(log, tf.Tensor) or not log.dtype.is_floating:
        return log
    return tf.math.multiply_no_nan(log, tf.cast(share, log.dtype))


def divided(
    values: tf.Tensor, weights: Any, mask: Any, reduction: str
) -> AbstractContextManager[None]:
    """Tells `weighed`, inside the block, the divisor of the mean that Keras takes of a loss.

    Args:
        values: Loss of each sample or of each of its time steps, times `weights`.
        weights: Weights whose sum is the divisor if `reduction` says so, or None.
        mask: Boolean mask of the values that count, or None.
        reduction: Keras' name of a reduction that divides.
    """
    divisor = None
    if given_losses.own_share() is not None and values.shape.rank:
        divisor = _divisor_of(values, weights, mask, reduction)
    return holding(divisor=divisor)


def _divisor_of(values: tf.Tensor, weights: Any, mask: Any, reduction: str) -> tf.Tensor | None:
    if reduction == "mean_with_sample_weight" and weights is not None:
        return tf.reduce_sum(tf.cast(weights, tf.float64))
    size = tf.cast(tf.size(values), tf.float64)
    if mask is not None:
        valid, steps = tf.reduce_sum(tf.cast(mask, tf.float64)), tf.size(mask)
        return valid * tf.math.divide_no_nan(size, tf.cast(steps, tf.float64))
    part, rest = given_losses.own_share(), values.shape[1:]
    is_known = rest.is_fully_defined() and part is not None and part.has_equal_shapes
    return None if is_known or not rest.rank else size


def weighed(loss: tf.Tensor) -> tf.Tensor:
    """Weighs a mean of Keras by the replica's share of the mean's divisor."""
    part, own = given_losses.own_share(), current().divisor
    if is_given(tf.distribute.get_strategy()):
        return given_losses.mean_of_keras(loss, _factor(own, part))
    if part is None or (part.is_equal and own is None):
        return loss
    if own is None:
        return _with_gradient(loss, None, part.ratio)
    share = _share_of_all(own)
    return _with_gradient(loss, tf.math.divide_no_nan(share, part.ratio), share)


def _factor(own: tf.Tensor | None, part: Share | None) -> tf.Tensor | None:
    """Returns the divisor's share over the samples' share, or None if samples are the divisor."""
    if own is None or part is None:
        return None
    return tf.math.divide_no_nan(_share_of_all(own), part.ratio)


def _share_of_all(own: tf.Tensor) -> tf.Tensor:
    return _share(own, tf.distribute.get_replica_context().all_reduce(_SUM, own))


def weighed_sum(loss: tf.Tensor) -> tf.Tensor:
    """Divides the value of a sum by the samples' share, as logs are weighed by that share.

    The gradient of the sum stays as it is.
    """
    if is_given(tf.distribute.get_strategy()):
        return given_losses.sum_of_samples(loss)
    part = given_losses.own_share()
    if part is None or part.is_equal:
        return loss
    return _with_gradient(loss, tf.math.reciprocal_no_nan(part.ratio), tf.ones_like(part.ratio))


def _with_gradient(loss: tf.Tensor, factor: tf.Tensor | None, slope: tf.Tensor) -> tf.Tensor:
    """Returns the loss times `factor`; its gradient is multiplied by `slope` instead."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def weigh(loss: tf.Tensor) -> Any:
        value = tf.identity(loss) if factor is None else loss * tf.cast(factor, loss.dtype)
        return value, lambda gradient: gradient * tf.cast(slope, gradient.dtype)

    return weigh(loss)


def _is_of_whole_batch(values: tf.Tensor) -> bool:
    if is_given(tf.distribute.get_strategy()):
        return given_losses.are_of_whole_batch(values)
    return bool(values.shape.rank == 0)


def update_mean(
    original: Callable[..., Any], metric: Any, values: Any, sample_weight: Any = None
) -> Any:
    """Stands in for `Mean.update_state`; weighs a value of a whole batch by the share.

    Keras counts the losses of a model's outputs once for each batch, regardless of its size. A
    replica's part of a batch therefore counts by the replica's share of the samples.
    """
    tensor = values
    if is_given(tf.distribute.get_strategy()):
        tensor = tf.convert_to_tensor(values)
        values = given_metrics.whole_value(tensor, metric, sample_weight)
    part = given_losses.own_share()
    is_counted_alike = sample_weight is not None or part is None or part.is_equal
    if not is_counted_alike and _is_of_whole_batch(tf.convert_to_tensor(tensor)):
        assert part is not None
        sample_weight = tf.cast(part.ratio, metric.dtype)
    return original(metric, values, sample_weight)
