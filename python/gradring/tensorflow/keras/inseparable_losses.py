"""Losses of a batch that the losses of its parts do not give, such as those of pairs of samples.

Each rank computes the loss of its own samples. The mean of these losses is that of one process only
if the loss is a mean or a sum over samples. The step's graph tells other losses (`graph.extent`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from gradring.tensorflow.graph import once
from gradring.tensorflow.graph.adoption import communicator_of, is_given, replicas_of
from gradring.tensorflow.graph.expressions import is_in_graph
from gradring.tensorflow.graph.extent import comes_from, extent_of
from gradring.tensorflow.graph.extent_rules import Extent
from gradring.tensorflow.graph.fallback import falls_back
from gradring.tensorflow.graph.replica_step import current
from gradring.tensorflow.rules.updates import updates_of

_OF_PAIRS = "as far as its graph tells, neither a mean nor a sum over samples, as of pairs"


def problem_of(loss: Any, extent: Extent) -> str | None:
    """Returns what a loss does that is neither a mean nor a sum over samples; None otherwise.

    Args:
        loss: A loss of the program.
        extent: Its dependence on the samples.
    """
    if extent.is_mixed:
        return "adds a sum over samples to what is no sum, such as a mean or a penalty of weights"
    if extent.is_weighted:
        return "is divided by a sum over data, such as a mask, which differs between the ranks"
    if extent.is_by_number:
        return (
            "is a sum, divided by a number that equals the samples of a rank, as `x.shape[0]` does"
        )
    if extent.is_curved:
        return "is no linear function of a mean over samples, as a root or a product of means"
    if is_in_graph(loss) and (extent.is_paired or extent.degree is None):
        return f"is, {_OF_PAIRS}"
    return None


@falls_back("the look for losses that parts of a batch cannot give", "nothing is said of them")
def check(losses: Sequence[Any], data: Sequence[Any] = ()) -> None:
    """Warns on rank 0, once for each kind, of losses in a strategy's scope that parts cannot give.

    Programs of a scope know the replicas. So a sum that is divided by a number, or stands beside
    other terms, may be right. The same goes for results of collectives, and for unknown losses.

    Args:
        losses: Tensors of the step.
        data: The batch, if collectives that give it are in the step's own graph.
    """
    step, strategy = current(), tf.distribute.get_strategy()
    communicator = communicator_of(strategy)
    if communicator is None or is_given(strategy) or not step.batch:
        return
    if replicas_of(strategy) == 1 or updates_of(strategy).are_local:
        return
    for loss in filter(is_in_graph, losses):
        extent = extent_of(loss, step.batch, filled=step.filled)
        # Losses of single samples may have passed layers that know the batch, and Keras multiplies
        # a mask by a quotient of its sums.
        is_whole = not loss.shape.rank and not extent.is_mixed
        is_weighted = extent.is_weighted and (is_whole or step.mask is None)
        if not (extent.is_paired or is_weighted or (is_whole and extent.is_curved)):
            continue
        problem = problem_of(loss, extent)
        if problem is None or once.has_warned(problem) or comes_from(loss, "Gradring", data):
            continue
        once.warn(
            communicator,
            problem,
            "a loss %s; each of %d replicas computes it of its own samples, so the training "
            "differs from that of one process; gather what it needs of all samples by "
            "gradring.tensorflow.all_gather. `gradring verify` shows how much",
            problem,
            replicas_of(strategy),
        )


@falls_back("the look for sums in add_loss of eager steps", "nothing is said of them")
def check_added(model: Any, loss: Any) -> None:
    """Warns on rank 0, once, of a scalar passed to `add_loss` in an eager step.

    No graph tells whether it is a mean or a sum over samples. Penalties of weights are neither, and
    not added by `add_loss`.
    """
    strategy = tf.distribute.get_strategy()
    communicator = communicator_of(strategy)
    if is_in_graph(loss) or tf.rank(loss) or once.has_warned("add_loss") or communicator is None:
        return
    penalties = sum(each.regularizer is not None for each in model.trainable_weights)
    if replicas_of(strategy) == 1 or len(model.losses) <= penalties:
        return
    once.warn(
        communicator,
        "add_loss",
        "add_loss got a scalar in an eager step, where gradring cannot tell a mean from a sum "
        "over samples. It counts as a mean: each of %d replicas divides it. Leave out "
        "run_eagerly=True, or pass one value for each sample",
        replicas_of(strategy),
    )
