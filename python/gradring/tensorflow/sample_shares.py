"""Each replica's share of the samples of a step, by which `fit` weighs its loss.

Keras takes the mean over each replica's samples, and adds the means up, divided by the number of
replicas. That is the mean over all samples only if the replicas have equally many; the gradient of
a replica's mean is therefore multiplied by what its share is of an equal one. Its value stays, as
Keras weighs what it logs by the samples anyway.

How many samples all replicas have is told where they tell each other whether they have any, so it
costs no message.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import tensorflow as tf

from gradring.tensorflow import compat
from gradring.tensorflow.adoption import communicator_of
from gradring.tensorflow.empty_batches import first_rows_of, unless
from gradring.tensorflow.rules.replicas import updates_of

_SUM = tf.distribute.ReduceOp.SUM

#: By strategy, an int64 scalar: how many samples all replicas have in the batch taken last.
_totals: WeakKeyDictionary[Any, tf.Variable] = WeakKeyDictionary()

#: Of the replica that runs a step of Keras; 1.0 is an equal share.
_share: ContextVar[tf.Tensor | None] = ContextVar("share", default=None)


class OwnBatch(NamedTuple):
    """A batch that no iterator has counted, as each rank gives it to `train_on_batch`."""

    data: Any


def own_batches(iterator: Any) -> Any:
    """What a loop of Keras takes, told apart from batches of distributed iterators."""
    if isinstance(iterator, (tf.data.Iterator, tf.distribute.DistributedIterator)):
        return iterator
    return map(OwnBatch, iterator)


# Counting


def count() -> None:
    """Lets the iterators of our strategies count, from now on."""
    compat.count_in_iterators(_count, _note)


def _count(strategy: Any, has_values: tf.Tensor, optionals: list[Any]) -> tf.Tensor | None:
    """How many replicas have values, a scalar; notes how many samples these are."""
    if communicator_of(strategy) is None:
        return None
    own = tf.add_n([_rows_in(optional) for optional in optionals])
    found = strategy.reduce(_SUM, tf.stack([tf.reshape(has_values, []), own]), axis=None)
    _assign(strategy, found[1])
    return found[0]


def _note(strategy: Any, batch: Any) -> None:
    """The same for iterators that have a value on every replica."""
    communicator = communicator_of(strategy)
    if communicator is None or strategy.num_replicas_in_sync == 1:
        return
    parts = [strategy.experimental_local_results(leaf) for leaf in tf.nest.flatten(batch)]
    found = [first_rows_of(list(replica)) for replica in zip(*parts, strict=True)]
    own = tf.add_n([tf.cast(0 if rows is None else rows, tf.int64) for rows in found])
    if all(isinstance(rows, int) for rows in found) and not tf.executing_eagerly():
        # Where the number is fixed, all ranks have as many.
        _assign(strategy, own * communicator.world_size)
    else:
        _assign(strategy, strategy.reduce(_SUM, own, axis=None))


def _rows_in(optional: Any) -> tf.Tensor:
    """The samples of a replica, or 0."""

    def rows() -> tf.Tensor:
        found = first_rows_of(optional.get_value())
        return tf.constant(0, tf.int64) if found is None else tf.cast(found, tf.int64)

    return tf.cond(optional.has_value(), rows, lambda: tf.constant(0, tf.int64))


def _assign(strategy: Any, total: tf.Tensor) -> None:
    with tf.device("/device:CPU:0"):
        # By its handle: what a function assigns is its own, as `broadcast_update` sees it.
        tf.raw_ops.AssignVariableOp(resource=_total_of(strategy).handle, value=total)


def _total_of(strategy: Any) -> tf.Variable:
    if strategy not in _totals:
        _totals[strategy] = compat.plain_variable(0, "samples", tf.int64)
    return _totals[strategy]


# Weighing


def make_function(original: Callable[..., Any], model: Any, step: Callable[[Any], Any]) -> Any:
    """Stands in for Keras' function of a loop: weighs what a step of training or testing does."""
    strategy = model.distribute_strategy
    if strategy.num_replicas_in_sync == 1:
        return original(model, step)

    @functools.wraps(step)
    def weighted(data: Any) -> Any:
        is_own = isinstance(data, OwnBatch)
        data = data.data if is_own else data
        own = first_rows_of(data)
        is_fixed = isinstance(own, int) and not tf.executing_eagerly() and not is_own
        if own is None or is_fixed or updates_of(strategy).are_local:
            return step(data)
        own = tf.cast(own, tf.int64)
        if is_own:
            total = tf.distribute.get_replica_context().all_reduce(_SUM, own)
        else:
            total = _total_of(strategy).read_value()
        return _weigh(functools.partial(step, data), model, own, total)

    return original(model, weighted)


def _weigh(step: Callable[[], Any], model: Any, own: tf.Tensor, total: tf.Tensor) -> Any:
    """The logs of a step with `own` of `total` samples, as parts of a mean over the replicas."""
    count = model.distribute_strategy.num_replicas_in_sync
    share = tf.math.divide_no_nan(tf.cast(own * count, tf.float64), tf.cast(total, tf.float64))
    token = _share.set(share)
    try:
        # The mean over no samples is a NaN, which counts for nothing.
        logs = unless(tf.equal(own, 0), model.metrics_variables, step)
    finally:
        _share.reset(token)
    return tf.nest.map_structure(functools.partial(_part, share), logs)


def _part(share: tf.Tensor, log: Any) -> Any:
    if not isinstance(log, tf.Tensor) or not log.dtype.is_floating:
        return log
    return tf.math.multiply_no_nan(log, tf.cast(share, log.dtype))


def weighed(loss: tf.Tensor) -> tf.Tensor:
    """A loss of Keras whose gradient is weighed by the replica's share of the samples."""
    share = _own_share()
    if share is None:
        return loss

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def weigh(loss: tf.Tensor) -> Any:
        return tf.identity(loss), lambda gradient: gradient * tf.cast(share, gradient.dtype)

    return weigh(loss)


def update_mean(
    original: Callable[..., Any], metric: Any, values: Any, sample_weight: Any = None
) -> Any:
    """Stands in for `Mean.update_state`: a number of a whole batch, such as a loss, has a weight.

    Keras counts the losses of a model's outputs once for each batch, whatever its size; a replica's
    part of a batch is therefore counted by its share.
    """
    share = _own_share()
    if share is not None and sample_weight is None and tf.convert_to_tensor(values).shape.rank == 0:
        sample_weight = tf.cast(share, metric.dtype)
    return original(metric, values, sample_weight)


def _own_share() -> tf.Tensor | None:
    share = _share.get()
    return None if share is None or not compat.can_take(share) else share
