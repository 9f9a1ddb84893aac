"""Losses and logs of models that `given` lets train together: sums and means over samples."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from gradring.tensorflow.graph import compat
from gradring.tensorflow.graph.adoption import is_given, replicas_of
from gradring.tensorflow.graph.expressions import is_in_graph
from gradring.tensorflow.graph.extent import extent_in_step
from gradring.tensorflow.graph.extent_rules import Extent
from gradring.tensorflow.graph.fallback import falls_back
from gradring.tensorflow.graph.replica_step import Share, current
from gradring.tensorflow.keras import given, terms_of_losses
from gradring.tensorflow.keras.inseparable_losses import problem_of
from gradring.tensorflow.keras.terms_of_losses import Slope

_SUM = tf.distribute.ReduceOp.SUM
_PIECE, _INSTEAD = "the look for terms of a loss", "it counts as a mean or a sum"


def own_share() -> Share | None:
    """Returns this rank's share of the samples, or None if it is unknown.

    A `tf.function` in a step reads the share from a variable, because other graphs may call it.
    """
    share = current().share
    if share is None or compat.can_take(share.ratio):
        return share
    if not given.is_in_step() or share.is_equal:
        return None
    return share._replace(ratio=_share_of_step().read_value())


def note_share(share: Share) -> None:
    """Stores this rank's share of the samples at the start of a step, for `own_share`."""
    with tf.device("/device:CPU:0"):
        _share_of_step().assign(share.ratio)


@functools.cache
def _share_of_step() -> tf.Variable:
    return compat.plain_variable(1, "share", tf.float64)


def mean_of_keras(loss: tf.Tensor, factor: tf.Tensor | None) -> tf.Tensor:
    """Notes a loss of Keras as a mean over samples, and multiplies it by `factor`, if any.

    The factor corrects a mean that is not divided by the number of samples, such as a masked one.
    """
    if is_in_graph(loss) and (extent := extent_in_step(loss)).is_paired:
        _warn_unless_mean(loss, extent)
    if factor is not None:
        loss = loss * tf.cast(factor, loss.dtype)
    return _as_mean(loss)


def sum_of_samples(loss: tf.Tensor) -> tf.Tensor:
    """Scales a sum over this rank's samples so that the mean over ranks is the sum over all."""
    if current().has_whole_batch:
        return _as_mean(loss)
    count, share = replicas_of(tf.distribute.get_strategy()), own_share()
    factor = tf.constant(float(count), tf.float64)
    if share is not None and not share.is_equal:
        factor *= tf.math.reciprocal_no_nan(share.ratio)
    return _as_mean(loss * tf.cast(factor, loss.dtype))


def checked_part(values: tf.Tensor, *, is_weighed: bool) -> tf.Tensor | None:
    """Returns the loss of a whole batch as a part of that of all samples, or None.

    Warns of values of samples that depend on other samples.

    Args:
        values: The values of samples that Keras adds up, or a scalar.
        is_weighed: True if the part will be multiplied by the rank's share of the samples.
    """
    if current().mask is not None:
        return None  # Keras has multiplied it by a quotient of its sums.
    part = part_of_terms(values, is_weighed=is_weighed)
    if part is not None:
        return part
    extent = extent_in_step(values)
    if extent.is_weighted or extent.is_paired:
        _warn_unless_mean(values, extent)
    return None


def part_of_terms(value: tf.Tensor, *, is_weighed: bool = True) -> tf.Tensor | None:
    """Returns a value whose terms need different factors, as this rank's part of a mean.

    Args:
        value: A loss, log or metric's value.
        is_weighed: True if the part will be multiplied by the rank's share of the samples.

    Returns:
        None for any other value.
    """
    with falls_back(_PIECE, _INSTEAD):
        found = terms_of_losses.part_of(value, _ratio() if is_weighed else None)
        if found is not None:
            part, uncertain = found
            for term in uncertain:
                _warn_unless_mean(term, extent_in_step(term))
            return _as_mean(part)
    return None


def slopes_of_loss(value: Any, *, has_others: bool = False) -> list[Slope]:
    """Returns the slopes of a loss whose terms need different factors; otherwise an empty list.

    Args:
        value: The loss.
        has_others: True if the gradients of other losses, which are no sums, are added.
    """
    with falls_back(_PIECE, _INSTEAD):
        found = terms_of_losses.slopes_of(value, _ratio())
        if not found and has_others and extent_in_step(value).is_sum:
            return [Slope(value, terms_of_losses.slope_of_sum(_ratio()), True)]
        return found
    return []


def _ratio() -> tf.Tensor | None:
    share = own_share()
    return None if share is None or share.is_equal else share.ratio


def is_sum_of_samples(loss: Any, total: tf.Tensor) -> bool:
    """Returns whether a value passed to `add_loss` is, or becomes, a sum over samples.

    Args:
        loss: The value; Keras adds up all of its elements.
        total: That sum.
    """
    if tf.is_symbolic_tensor(total):
        extent = extent_in_step(total)
        if _may_have_rows(loss):
            return True
        if is_given(tf.distribute.get_strategy()):
            _warn_unless_mean(total, extent)
        return extent.is_sum
    return _has_rows(tf.convert_to_tensor(loss))


def whole_logs(logs: Any) -> Any:
    """Extends a step's logs to all samples: gathers values per sample, and adds up sums."""

    def whole(log: Any) -> Any:
        if not isinstance(log, tf.Tensor):
            return log
        if _has_rows(log):
            if current().has_whole_batch:
                return log
            return tf.distribute.get_replica_context().all_gather(log, axis=0)
        extent = extent_in_step(log)
        if not extent.is_sum or extent.is_weighted:
            part = part_of_terms(log)
            return log if part is None else part
        if log.dtype.is_integer and not current().has_whole_batch:
            # Collectives do not take all types of integers.
            total = tf.distribute.get_replica_context().all_reduce(_SUM, tf.cast(log, tf.int64))
            return tf.cast(total, log.dtype)
        return sum_of_samples(log) if log.dtype.is_floating else log

    return tf.nest.map_structure(whole, logs)


def are_of_whole_batch(values: tf.Tensor) -> bool:
    """Returns whether values of a loss are one number for a batch, or one for each column."""
    if values.shape.rank == 0:
        return True
    extent = extent_in_step(values)
    is_known = extent.degree is not None and not extent.has_rows
    return is_known and (extent.depends or extent.is_mean)


def _has_rows(value: tf.Tensor) -> bool:
    """Returns whether a tensor has one row for each sample."""
    if tf.is_symbolic_tensor(value):
        return bool(value.shape.rank) and extent_in_step(value).has_rows
    return bool(value.shape.rank) and value.shape[0] in _sizes_of_batch()


def _may_have_rows(loss: Any) -> bool:
    """Returns whether a loss of unknown extent has as many values as the batch has samples."""
    if not is_in_graph(loss) or not loss.shape.rank:
        return False
    extent = extent_in_step(loss)
    is_unknown = extent.degree is None and not (extent.is_paired or extent.is_mixed)
    return is_unknown and loss.shape[0] is None and None in _sizes_of_batch()


def _sizes_of_batch() -> set[int]:
    return {each.shape[0] for each in current().batch if each.shape.rank}


def _as_mean(loss: tf.Tensor) -> tf.Tensor:
    current().means.append(loss)
    return loss


def are_sums(targets: Sequence[Any]) -> bool:
    """Returns whether losses of the program's own are sums over samples; warns of others."""
    extents = [extent_in_step(target) for target in targets]
    for target, extent in zip(targets, extents, strict=True):
        _warn_unless_mean(target, extent)
    if not (current().means or all(map(is_in_graph, targets))):
        _warn_of_eager_loss()
    if current().has_whole_batch:
        return False  # every rank has the same sum, so the mean over ranks is that sum
    return bool(extents) and all(extent.is_sum for extent in extents)


def _warn_unless_mean(loss: Any, extent: Extent) -> None:
    """Warns on rank 0 of a loss that is neither a mean nor a sum over samples.

    The ranks' parts of such a loss do not add up to the loss of one process.
    """
    what = problem_of(loss, extent)
    if what is not None:
        given.warn_once(
            what,
            "a loss %s; it is taken for a mean, so its gradients may differ from those of one "
            "process (GRADRING_WITH_STRATEGY). `gradring verify` shows how much",
            what,
        )


def _warn_of_eager_loss() -> None:
    """Warns on rank 0 of a loss without a graph in a step in which Keras has computed none."""
    world_size = given.strategy().communicator.world_size
    if world_size > 1:
        given.warn_once(
            "eager loss",
            "an eager step does not show whether a loss is a mean or a sum over samples; it is "
            "taken for a mean, so a sum is divided by %d ranks (GRADRING_WITH_STRATEGY); leave out "
            "run_eagerly=True",
            world_size,
        )
