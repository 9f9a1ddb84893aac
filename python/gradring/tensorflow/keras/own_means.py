"""Means that a `train_step` computes by itself, and whose gradients a strategy adds up.

Under `tf.distribute`, each replica divides its loss by the global batch size, or its mean by the
number of replicas, as Keras' losses do. The gradient of an undivided mean is too large by a factor
of the number of replicas. Rank 0 warns once for each optimizer if the step's graph shows an
undivided mean. This is a loss that does not grow with the batch (`graph.extent`), and that is
neither multiplied nor divided by the number of replicas. With two replicas, a loss's own factor of
0.5 or 2 looks like this number. So there it counts only if the program has read the number.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any
from weakref import WeakSet

import tensorflow as tf

from gradring.tensorflow.graph.adoption import communicator_of, replicas_of
from gradring.tensorflow.graph.extent import extent_of, factors_of
from gradring.tensorflow.graph.extent_rules import Extent
from gradring.tensorflow.graph.fallback import falls_back
from gradring.tensorflow.graph.replica_step import current
from gradring.tensorflow.keras import inseparable_losses
from gradring.tensorflow.rules.updates import updates_of

_log = logging.getLogger("gradring")

_PIECE = "the look for means that are added up"
_INSTEAD = "nothing is said of them"

#: Number of replicas that is often a factor of a loss, and so is its inverse.
_COMMON_FACTOR = 2.0
#: Packages that read the number of replicas for themselves.
_LIBRARIES = ("gradring", "keras", "tensorflow", "tf_keras")
#: The module of TensorFlow that divides a program's losses by it.
_DIVIDES = tf.nn.compute_average_loss.__module__

_looked_at: WeakSet[Any] = WeakSet()


def note_read(extended: Any, frame: FrameType | None) -> None:
    """Notes that the program has read the number of replicas, if `frame` is one of the program."""
    if extended.replicas_were_read:
        return
    if frame is not None and frame.f_code.co_name == "num_replicas_in_sync":
        frame = frame.f_back  # the property of a replica context
    module = "" if frame is None else str(frame.f_globals.get("__name__"))
    is_of_library = module.partition(".")[0] in _LIBRARIES
    extended.replicas_were_read = not is_of_library or module == _DIVIDES


def gradient(
    original: Callable[..., Any], tape: Any, target: Any, *args: Any, **kwargs: Any
) -> Any:
    """Stands in for `GradientTape.gradient`; notes undivided means in a step of Keras."""
    found = original(tape, target, *args, **kwargs)
    _note(tf.nest.flatten(target))
    return found


@falls_back(_PIECE, _INSTEAD)
def _note(losses: Iterable[Any]) -> None:
    step = current()
    if not step.batch or step.keras_losses:
        return
    losses = list(losses)
    inseparable_losses.check(losses)
    step.own_means.extend(loss for loss in losses if _is_undivided_mean(loss, step.batch))


def _is_undivided_mean(loss: Any, batch: list[Any]) -> bool:
    extent = extent_of(loss, batch)
    if extent != Extent(degree=0) or not extent.is_mean:
        return False
    return not _are_of_replicas(factors_of(loss))


def _are_of_replicas(factors: Iterable[float]) -> bool:
    """Returns whether the number of replicas, or its inverse, is among the factors.

    A factor of 0.5 or 2 says nothing in a program that has not read the number.
    """
    strategy = tf.distribute.get_strategy()
    count = float(replicas_of(strategy))
    if count == _COMMON_FACTOR and not getattr(strategy.extended, "replicas_were_read", True):
        return False
    return any(
        math.isclose(each, wanted, rel_tol=1e-6)
        for each in factors
        for wanted in (count, 1 / count)
    )


@falls_back(_PIECE, _INSTEAD)
def check(optimizer: Any, gradients: Iterable[Any], variables: Iterable[Any]) -> None:
    """Warns in an optimizer's first step if it adds up gradients of an undivided mean."""
    step, strategy = current(), tf.distribute.get_strategy()
    communicator = communicator_of(strategy)
    if optimizer in _looked_at or communicator is None:
        return
    _looked_at.add(optimizer)
    if not step.own_means or replicas_of(strategy) == 1 or updates_of(strategy).are_local:
        return
    # The program may have averaged the gradients, or divided them.
    if any(step.reductions.cover(variable) for variable in variables):
        return
    dense = [each for each in gradients if isinstance(each, tf.Tensor)]
    if dense and all(_are_of_replicas(factors_of(each, last=True)) for each in dense):
        return
    if communicator.rank == 0:
        _log.warning(
            "the optimizer %r adds up the gradients of a mean over %d replicas, so they are %d "
            "times those of one process. Divide the loss by strategy.num_replicas_in_sync, and not "
            "by a number of your own; or use self.compute_loss or keras.losses. "
            "`gradring verify` compares the training with one process",
            getattr(optimizer, "name", type(optimizer).__name__),
            replicas_of(strategy),
            replicas_of(strategy),
        )
