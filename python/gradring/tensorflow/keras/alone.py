"""Detection of models that each rank trains alone in a group, newcomers' likeliest mistake.

A model trains without an error even if it was made outside of the strategy's scope, or if the
program only calls `gradring.init()`. The sign is an optimizer that applies gradients of which none
was reduced. Each optimizer is checked once, after its first step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import tensorflow as tf

from gradring.config.words import counted
from gradring.gradients.names import name_of
from gradring.group.communicator import open_groups
from gradring.tensorflow.graph import apart, replica_step
from gradring.tensorflow.graph.adoption import strategy_of
from gradring.tensorflow.graph.fallback import falls_back
from gradring.tensorflow.keras import given
from gradring.tensorflow.seams import keras_names
from gradring.tensorflow.seams.table import Replacement, Seam, find, replace

_PIECE = "the look for models that a rank trains alone"
_INSTEAD = "nothing is said of them"

_watched: set[str] = set()
_checked: WeakSet[Any] = WeakSet()


@falls_back(_PIECE, _INSTEAD)
def watch(package: Any) -> None:
    """Checks the optimizers of an imported Keras 3 or `tf_keras` from now on."""
    name = package.__name__
    is_keras = name == "keras"
    if name in _watched or (is_keras and package.backend.backend() != "tensorflow"):
        return
    _watched.add(name)
    rows: Sequence[Seam] = (
        [keras_names.APPLY] if is_keras else [keras_names.LEGACY_APPLY, keras_names.OLDEST_APPLY]
    )
    convert = tf.autograph.experimental.do_not_convert
    found = find(name, rows)
    replace(
        [found],
        [Replacement(row, _apply, _may_be_alone, convert) for row in found.owners],
    )


def _may_be_alone(optimizer: Any) -> bool:
    is_ours = replica_step.current().is_in_run or given.strategy() is not None
    return not is_ours and optimizer not in _checked and bool(_groups())


def _groups() -> list[Any]:
    return [group for group in open_groups if group.world_size > 1]


def _apply(original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(optimizer, *args, **kwargs)
    _check_reduced(optimizer)
    return result


@falls_back(_PIECE, _INSTEAD)
def _check_reduced(optimizer: Any) -> None:
    """Warns if no gradient of the optimizer's variables was reduced.

    Raises:
        gradring.errors.ConfigError: No gradient was reduced, in the group of a strict strategy.
    """
    if optimizer in _checked:
        return
    _checked.add(optimizer)
    variables = list(keras_names.TRAINED.of(optimizer, None) or ())
    if not variables or strategy_of(variables) is not None:
        return
    known = replica_step.reductions()
    if any(each.cover(variable) for each in known for variable in variables):
        return
    (group, *_) = _groups()
    apart.tell(
        group,
        f"each of {group.world_size} ranks trains {counted(len(variables), 'variable')} "
        f"({name_of(variables[0])}{', ...' if len(variables) > 1 else ''}) alone: no gradient that "
        f"{type(optimizer).__name__} applies was reduced. Make the model inside of `with "
        "strategy.scope():`; or reduce by gradring.tensorflow.GradientReducer; or start a script "
        "that knows of no ranks by `gradring run --with-strategy`",
    )
