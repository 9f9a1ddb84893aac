"""Losses of a program's own, whose gradients are added up over the replicas as they are.

Strategies add up gradients. Keras therefore divides its means by the number of replicas, and leaves
its sums as they are. A mean that a program takes by itself, in a `train_step` or a `compute_loss`,
is divided by nobody, as under TensorFlow's own strategies. A program of `tf_keras` that was given
its strategy (`given_strategy.py`) cannot know that, so rank 0 warns, once for each optimizer. What
is seen is whether a step that applies gradients has computed any loss of Keras; a sum of such a
loss and a mean of the program's own passes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import tensorflow as tf

from gradring.tensorflow.graph.adoption import communicator_of
from gradring.tensorflow.graph.replica_step import current

_log = logging.getLogger("gradring")

#: Whether optimizers are looked at.
_warns = False

_checked: WeakSet[Any] = WeakSet()


def warn() -> None:
    """From now on, warns of such a loss, once for each optimizer."""
    global _warns
    _warns = True


def note() -> None:
    """Keras has computed a loss whose gradients may be added up."""
    step = current()
    if step.is_in_run:
        step.keras_losses.append(True)


def noting(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Stands in for a function of Keras that computes such a loss."""
    note()
    return original(*args, **kwargs)


def noting_legacy(original: Callable[..., Any], loss: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for the `__call__` of losses of `tf_keras`, which refuse to take a mean here."""
    if loss.reduction != "none":
        note()
    return original(loss, *args, **kwargs)


def check(optimizer: Any) -> None:
    """An optimizer applies gradients: in its first step, warns of a loss that is not Keras'.

    A later step may call a function that was traced before, in which Keras' loss is not seen.
    """
    if not _warns or optimizer in _checked:
        return
    _checked.add(optimizer)
    strategy = tf.distribute.get_strategy()
    communicator = communicator_of(strategy)
    has_other_loss = current().is_in_run and not current().keras_losses
    if not has_other_loss or communicator is None or strategy.num_replicas_in_sync == 1:
        return
    if communicator.rank != 0:
        return
    _log.warning(
        "the optimizer %r applies gradients of a loss that is no loss of Keras, and they are added "
        "up over %d replicas (GRADRING_WITH_STRATEGY): where the program takes a mean over its "
        "batch, they are %d times too large; there, compute the loss by self.compute_loss or "
        "keras.losses, or divide it by tf.distribute.get_strategy().num_replicas_in_sync",
        getattr(optimizer, "name", type(optimizer).__name__),
        strategy.num_replicas_in_sync,
        strategy.num_replicas_in_sync,
    )


def check_legacy(original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for the `apply_gradients` of optimizers of `tf_keras`."""
    check(optimizer)
    return original(optimizer, *args, **kwargs)
