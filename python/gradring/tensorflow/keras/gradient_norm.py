"""The global norms of the gradients that a Keras 3 optimizer reduces, on request.

They leave the graph in a variable, for Keras offers an optimizer no way into the logs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import tensorflow as tf

from gradring.errors import ConfigError
from gradring.tensorflow.graph import compat
from gradring.tensorflow.graph.sparse import with_each_index_once
from gradring.tensorflow.rules.updates import Gradient
from gradring.tensorflow.seams import keras_names


class Norms(NamedTuple):
    """Variables with the norms of what an optimizer has been given last; NaN before."""

    #: Of the sum over all replicas, before it is clipped.
    reduced: tf.Variable
    #: Of this replica's part of it times their number: the gradient of its own batch.
    own: tf.Variable


_watched: WeakKeyDictionary[Any, Norms] = WeakKeyDictionary()


def watch(model: tf.keras.Model) -> Norms:
    """The norms of the model's gradients.

    Raises:
        gradring.errors.ConfigError: The model's optimizer is not of Keras 3.
    """
    # A `LossScaleOptimizer` hands unscaled gradients to the one inside.
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    if keras_names.APPLY_GRADIENTS.of(optimizer, None) is None:
        raise ConfigError(
            f"gradient_norm=True needs an optimizer of Keras 3, not {type(optimizer).__name__}; "
            "leave it out"
        )
    if optimizer not in _watched:
        names = ("gradring_gradient_norm", "gradring_own_gradient_norm")
        _watched[optimizer] = Norms(*(compat.plain_variable(float("nan"), name) for name in names))
        # An earlier `fit` may have traced the step without it.
        model.make_train_function(force=True)
    return _watched[optimizer]


def note_reduced(optimizer: Any, gradients: Sequence[Gradient]) -> None:
    """Tells the watcher, if there is one, the sums over all replicas."""
    if optimizer in _watched:
        _watched[optimizer].reduced.assign(_norm(gradients))


def note_own(optimizer: Any, gradients: Sequence[Gradient]) -> None:
    """Tells the watcher, if there is one, what this replica adds to the sums."""
    if optimizer in _watched:
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        _watched[optimizer].own.assign(_norm(gradients) * replicas)


def _norm(gradients: Sequence[Gradient]) -> tf.Tensor:
    # The norm is that of the table's gradient, in which each index has one row.
    once = [with_each_index_once(gradient) for gradient in gradients]
    values = [getattr(gradient, "values", gradient) for gradient in once]
    parts = [tf.norm(tf.cast(value, tf.float32)) for value in values if value is not None]
    return tf.norm(tf.stack(parts))
