"""Weights that a program loads from files between two steps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from gradring.tensorflow.graph import compat, replica_step
from gradring.tensorflow.graph.fallback import falls_back
from gradring.tensorflow.graph.model_variables import variables_of
from gradring.tensorflow.rules.replicas import rule_of


@functools.cache
def watch_checkpoints() -> None:
    """Has rules know of each `tf.train.Checkpoint.read` and `restore`."""
    compat.replace({"Checkpoint.read": note})


def note(original: Callable[..., Any], loaded: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for a method that loads a model or checkpoint; tells the rule of its variables."""
    result = original(loaded, *args, **kwargs)
    if replica_step.is_outside():
        _tell_rule(loaded)
    return result


@falls_back("the note of loaded weights", "a rule may apply gradients kept from before")
def _tell_rule(loaded: Any) -> None:
    variables = list(variables_of(loaded))
    rule_of(variables).note_loaded(variables)
