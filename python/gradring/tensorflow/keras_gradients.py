"""The names of the gradients that Keras 3 reduces.

Keras 3 hands its gradients to `tf.distribute` without their variables. This notes, for as long as
an optimizer works, which variables it has.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from gradring.tensorflow.naming import gradients_of


def name_keras_gradients() -> None:
    """Makes Keras' optimizers tell their variables; does nothing before Keras is imported."""
    keras = sys.modules.get("keras")
    optimizer = getattr(getattr(keras, "optimizers", None), "Optimizer", None)
    update = getattr(optimizer, "_backend_update_step", None)
    if update is None or hasattr(update, "tells_variables"):
        return

    @functools.wraps(update)
    def telling(self: Any, grads: Any, trainable_variables: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = zip(grads, trainable_variables, strict=False)
        with gradients_of([variable for grad, variable in pairs if grad is not None]):
            return update(self, grads, trainable_variables, *args, **kwargs)

    telling.tells_variables = True  # type: ignore[attr-defined]
    optimizer._backend_update_step = telling  # type: ignore[union-attr]
