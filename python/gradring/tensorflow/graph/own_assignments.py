"""Variables that a replica assigns, by itself or with a reduction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from gradring.tensorflow.graph import compat
from gradring.tensorflow.graph.adoption import communicator_of


def note_own_assignments(note: Callable[[Any], None]) -> None:
    """Starts to record the variables that a replica assigns by itself, for `is_assigned_alone`.

    Plain numbers are reduced like tensors, if the variable has an aggregation.

    Args:
        note: Called with each such variable before its assignment.
    """

    def update(
        update_replica: Callable[..., Any], self: Any, update_fn: Any, value: Any, **kwargs: Any
    ) -> Any:
        if self.aggregation == tf.VariableAggregation.NONE:
            note(self)
            self._gradring_is_assigned_alone = True
        elif communicator_of(self.distribute_strategy) is not None:
            value = _reduced_as_tensor(self, value)
        return update_replica(self, update_fn, value, **kwargs)

    compat.replace({"MirroredVariable._update_replica": update})


def _reduced_as_tensor(variable: Any, value: Any) -> Any:
    """Returns a value as a tensor, if it must be reduced before it is assigned to a variable.

    TensorFlow reduces tensors only. Without a merge call, it assigns a plain number as it is, so
    `assign_add(1)` of each replica would count once.
    """
    reduces = variable.aggregation == tf.VariableAggregation.SUM or (
        variable.aggregation == tf.VariableAggregation.MEAN and variable.dtype.is_floating
    )
    if not reduces or tf.is_tensor(value) or isinstance(value, tf.Variable):
        return value
    return tf.convert_to_tensor(value, variable.dtype)


def is_assigned_alone(variable: Any) -> bool:
    """Returns whether a replica has assigned a mirrored variable without an aggregation.

    TensorFlow then writes to the replica's own copy without a warning.
    """
    return getattr(variable, "_gradring_is_assigned_alone", False)
