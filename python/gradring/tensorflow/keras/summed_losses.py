"""Losses of a program's own, whose gradients a strategy adds up undivided.

Strategies add up gradients. Keras therefore divides its means by the number of replicas, and leaves
its sums as they are. A mean that a program computes by itself, in a `train_step` or a
`compute_loss`, is not divided, as under TensorFlow's own strategies. A program of `tf_keras` that
was given its strategy (`given_strategy.py`) cannot divide, so rank 0 warns once for each optimizer.
The check only sees whether a step that applies gradients has computed any loss of Keras. It misses
a mean of the program's own that is added to a loss of Keras.
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

#: True if optimizers are checked.
_warns = False

_checked: WeakSet[Any] = WeakSet()


def warn() -> None:
    """Enables the warning, once for each optimizer."""
    global _warns
    _warns = True


def warns() -> bool:
    """Returns whether the program is one of `tf_keras` that was given its strategy."""
    return _warns


def note() -> None:
    """Notes that Keras has computed a loss whose gradients may be added up."""
    step = current()
    if step.is_in_run:
        step.keras_losses.append(True)


def noting(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Stands in for a function of Keras that computes a loss whose gradients may be added up."""
    note()
    return original(*args, **kwargs)


def noting_legacy(original: Callable[..., Any], loss: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for `__call__` of `tf_keras` losses; notes all but reduction "none".

    Under a strategy these losses refuse to take a mean.
    """
    if loss.reduction != "none":
        note()
    return original(loss, *args, **kwargs)


def check(optimizer: Any) -> None:
    """Warns in an optimizer's first step if the step has computed no loss of Keras.

    Later steps are not checked: they may call a function that was traced before, and the losses of
    Keras in it are noted only while it is traced.
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
        "the optimizer %r applies gradients of a loss that is no loss of Keras, added up over %d "
        "replicas (GRADRING_WITH_STRATEGY). If the loss is a mean over the batch, they are %d "
        "times too large; use self.compute_loss or keras.losses, or divide it by "
        "tf.distribute.get_strategy().num_replicas_in_sync",
        getattr(optimizer, "name", type(optimizer).__name__),
        strategy.num_replicas_in_sync,
        strategy.num_replicas_in_sync,
    )


def check_legacy(original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for the `apply_gradients` of `tf_keras` optimizers; checks the step's losses."""
    check(optimizer)
    return original(optimizer, *args, **kwargs)
