"""Variables that a replica assigns by itself, without a reduction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from gradring.tensorflow.graph import compat


def note_own_assignments(note: Callable[[Any], None]) -> None:
    """Starts to record the variables that a replica assigns by itself, for `is_assigned_alone`.

    Args:
        note: Called with each such variable before its assignment.
    """

    def update(
        update_replica: Callable[..., Any], self: Any, update_fn: Any, value: Any, **kwargs: Any
    ) -> Any:
        if self.aggregation == tf.VariableAggregation.NONE:
            note(self)
            self._gradring_is_assigned_alone = True
        return update_replica(self, update_fn, value, **kwargs)

    compat.replace({"MirroredVariable._update_replica": update})


def is_assigned_alone(variable: Any) -> bool:
    """Returns whether a replica has assigned a mirrored variable without an aggregation.

    TensorFlow then writes to the replica's own copy without a warning.
    """
    return getattr(variable, "_gradring_is_assigned_alone", False)
