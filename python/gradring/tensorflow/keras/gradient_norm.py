"""Global norms of the gradients that a Keras 3 optimizer reduces, on request.

The norms leave the graph in variables, because an optimizer cannot add to Keras' logs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import tensorflow as tf

from gradring.errors import ConfigError
from gradring.tensorflow.graph import compat
from gradring.tensorflow.graph.sparse import with_each_index_once
from gradring.tensorflow.rules.updates import Gradient, updates_of
from gradring.tensorflow.seams import keras_names


class Norms(NamedTuple):
    """Variables with the norms of an optimizer's last gradients; NaN before its first step."""

    #: Norm of the gradients' sum over all replicas, before clipping.
    reduced: tf.Variable
    #: Norm of this replica's gradients times the number of replicas: those of its own batch.
    own: tf.Variable


_watched: WeakKeyDictionary[Any, Norms] = WeakKeyDictionary()


def watch(model: tf.keras.Model) -> Norms:
    """Returns the variables with the norms of the model's gradients, and begins to update them.

    Raises:
        gradring.errors.ConfigError: The model's optimizer is not of Keras 3.
    """
    # A `LossScaleOptimizer` passes unscaled gradients to its inner optimizer.
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    if keras_names.APPLY_GRADIENTS.of(optimizer, None) is None:
        raise ConfigError(
            f"gradient_norm=True needs an optimizer of Keras 3, not {type(optimizer).__name__}; "
            "leave it out"
        )
    if optimizer not in _watched:
        names = ("gradring_gradient_norm", "gradring_own_gradient_norm")
        _watched[optimizer] = Norms(*(compat.plain_variable(float("nan"), name) for name in names))
        # An earlier `fit` may have traced the step without the norms.
        model.make_train_function(force=True)
    return _watched[optimizer]


def note_reduced(optimizer: Any, gradients: Sequence[Gradient]) -> None:
    """Stores the norm of the gradients' sum over all replicas, if `watch` asked for it."""
    if optimizer in _watched:
        rule = updates_of(tf.distribute.get_strategy())
        _watched[optimizer].reduced.assign(rule.norm(_norm(gradients)))


def note_own(optimizer: Any, gradients: Sequence[Gradient]) -> None:
    """Stores the norm of this replica's own gradients, if `watch` asked for it."""
    if optimizer in _watched:
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        _watched[optimizer].own.assign(_norm(gradients) * replicas)


def _norm(gradients: Sequence[Gradient]) -> tf.Tensor:
    # Rows of one index are summed first: the norm is that of the dense gradient.
    once = [with_each_index_once(gradient) for gradient in gradients]
    values = [getattr(gradient, "values", gradient) for gradient in once]
    parts = [tf.norm(tf.cast(value, tf.float32)) for value in values if value is not None]
    return tf.norm(tf.stack(parts))
