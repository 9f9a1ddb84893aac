"""The global norm of the gradients that a Keras 3 optimizer reduces, on request.

It leaves the graph in a variable, for Keras offers an optimizer no way into the logs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import tensorflow as tf

from gradring.errors import ConfigError
from gradring.tensorflow import compat

#: By optimizer: a variable with the norm of the gradients that it reduced last.
_norms: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def watch(model: tf.keras.Model) -> tf.Variable:
    """The variable with the norm of the model's reduced gradients, before they are clipped.

    Raises:
        gradring.errors.ConfigError: The model's optimizer is not of Keras 3.
    """
    # A `LossScaleOptimizer` hands unscaled gradients to the one inside.
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    if not hasattr(optimizer, "_backend_apply_gradients"):
        raise ConfigError(
            f"gradient_norm=True needs an optimizer of Keras 3, not {type(optimizer).__name__}; "
            "leave it out"
        )
    if optimizer not in _norms:
        _norms[optimizer] = compat.plain_variable(float("nan"), "gradring_gradient_norm")
        # An earlier `fit` may have traced the step without it.
        model.make_train_function(force=True)
    return _norms[optimizer]


def note(optimizer: Any, reduced: Sequence[tf.Tensor | tf.IndexedSlices | None]) -> None:
    """Tells the watcher, if there is one, the sums over all replicas."""
    if optimizer in _norms:
        values = [getattr(gradient, "values", gradient) for gradient in reduced]
        parts = [tf.norm(tf.cast(value, tf.float32)) for value in values if value is not None]
        _norms[optimizer].assign(tf.norm(tf.stack(parts)))
