"""Detection of variables that each rank trains alone in a group, newcomers' likeliest mistake.

A model trains without an error even if it was made outside of the strategy's scope, or if the
program only calls `gradring.init()`, or reduces some gradients only. The sign is an optimizer that
applies gradients that were not reduced. Each optimizer is checked once, after its first step.
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
    """Stands in for `apply` of Keras 3, and `apply_gradients` of `tf_keras`."""
    gradients = list(args[0]) if args else None  # may be a `zip`, which is read once
    result = original(optimizer, *args if gradients is None else (gradients, *args[1:]), **kwargs)
    _check_reduced(optimizer, gradients or (), *args[1:2])
    return result


@falls_back(_PIECE, _INSTEAD)
def _check_reduced(optimizer: Any, gradients: Sequence[Any], given_variables: Any = None) -> None:
    """Warns of the optimizer's variables whose gradients were not reduced.

    Raises:
        gradring.errors.ConfigError: There are some, in the group of a strict strategy.
    """
    if optimizer in _checked:
        return
    _checked.add(optimizer)
    variables = list(keras_names.TRAINED.of(optimizer, None) or ())
    if not variables or strategy_of(variables) is not None:
        return
    known = replica_step.reductions()
    unreduced = [each for each in variables if not any(those.cover(each) for those in known)]
    (group, *_) = _groups()
    ranks = f"each of {group.world_size} ranks trains"
    if len(unreduced) == len(variables):
        apart.tell(
            group,
            f"{ranks} {_counted(unreduced)} alone: no gradient that {type(optimizer).__name__} "
            "applies was reduced. Make the model inside of `with strategy.scope():`; or reduce by "
            "gradring.tensorflow.GradientReducer; or start a script that knows of no ranks by "
            "`gradring run --with-strategy`",
        )
        return
    without = _without_gradient(gradients, given_variables or variables)
    unreduced = [each for each in unreduced if replica_step.id_of(each) not in without]
    if unreduced:
        apart.tell(
            group,
            f"{ranks} {_counted(unreduced)} of {len(variables)} alone: {type(optimizer).__name__} "
            "applies gradients of them that were not reduced. Pass the gradients of all variables "
            "to gradring.tensorflow.GradientReducer, unless each rank is to have its own values",
        )


def _counted(variables: Sequence[Any]) -> str:
    names = name_of(variables[0]) + (", ..." if len(variables) > 1 else "")
    return f"{counted(len(variables), 'variable')} ({names})"


def _without_gradient(gradients: Sequence[Any], variables: Sequence[Any]) -> set[int]:
    """Returns `id_of` the variables whose gradients are None; `tf_keras` passes pairs."""
    are_pairs = any(isinstance(each, tuple) for each in gradients)
    pairs = gradients if are_pairs else list(zip(gradients, variables, strict=False))
    return {replica_step.id_of(variable) for gradient, variable in pairs if gradient is None}
