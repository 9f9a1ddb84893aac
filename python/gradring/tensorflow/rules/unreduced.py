"""Refuses optimizers that update variables by gradients that no collective has reduced.

Ranks would train apart without a word: in a loop without `strategy.run`, with an optimizer that
assigns variables by itself, or with a version of Keras or TensorFlow that calls no function of ours
any more. So what the strategy sees of an update is compared with what was reduced. A right program
must not be refused, so what is uncertain passes.

That happens while a function is traced, and in eager steps until a variable has been checked once.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any

import numpy as np
import tensorflow as tf

from gradring.config.words import counted
from gradring.errors import ConfigError
from gradring.gradients.names import name_of
from gradring.tensorflow.graph import replica_step
from gradring.tensorflow.graph.adoption import communicator_of
from gradring.tensorflow.graph.fallback import falls_back
from gradring.tensorflow.graph.replica_step import ReplicaStep, id_of
from gradring.tensorflow.rules.updates import Updates, updates_of
from gradring.tensorflow.seams import keras_names
from gradring.tensorflow.seams.table import TITLES

_optional = functools.partial(
    falls_back,
    "the check that gradients are reduced",
    "optimizers update variables unchecked",
)

#: Methods by which a program hands gradients to an optimizer.
_ENTRANCES = {"apply", "apply_gradients", "tf__apply", "tf__apply_gradients"}

#: So many names are in a message.
_SHOWN = 2


@_optional()
def note_update(strategy: Any, variable: Any, args: Iterable[Any]) -> None:
    """A variable is about to be updated by `tf.distribute`, with these arguments.

    Raises:
        gradring.errors.ConfigError: An optimizer does it, and no collective has reduced the
            gradient.
    """
    # The decay of weights has no arguments, and an average of weights has variables.
    gradients = [arg for arg in args if tf.is_tensor(arg) and not hasattr(arg, "assign")]
    if gradients:
        _note(strategy, variable, gradients)


@_optional()
def note_assignment(variable: Any) -> None:
    """A replica assigns its own copy of a variable by itself, as `note_update`."""
    _note(variable.distribute_strategy, variable, None)


@_optional()
def check(step: ReplicaStep) -> None:
    """A step ends in which optimizers may have assigned variables by themselves.

    Raises:
        gradring.errors.ConfigError: As for `note_update`.
    """
    for variable, optimizer in step.assigned:
        strategy = variable.distribute_strategy
        if not _is_covered(variable):
            assigned = [each for each, by in step.assigned if by is optimizer]
            _refuse(strategy, optimizer, [each for each in assigned if not _is_covered(each)])
        _remember(variable)


def _note(strategy: Any, variable: Any, gradients: Sequence[Any] | None) -> None:
    if not getattr(variable, "trainable", False) or not _is_shared(strategy):
        return
    step = replica_step.current()
    if tf.executing_eagerly() and getattr(variable, "_gradring_is_reduced", None) == step.is_in_run:
        return
    if step.is_broadcast or step.is_alone:
        return
    # Several local replicas are threads, which do not know what is reduced for all of them.
    if gradients is None and len(strategy.extended.worker_devices) > 1:
        return
    optimizer, told = _optimizer_above(variable, any_method=gradients is not None)
    if optimizer is None:
        return
    if gradients is None and step.is_in_run:
        # It may assign a variable first for another reason, such as a decay.
        step.assigned.append((variable, optimizer))
    elif _is_reduced(strategy, variable):
        _remember(variable)
    elif not _are_zero(gradients):
        _refuse(strategy, optimizer, [each for each in told if not _is_reduced(strategy, each)])


def _are_zero(gradients: Sequence[Any] | None) -> bool:
    """Whether they are known to change nothing, as those that make an optimizer's slots."""
    if gradients is None or not tf.executing_eagerly():
        return False
    return not any(np.any(tf.convert_to_tensor(each).numpy()) for each in gradients)


def _is_shared(strategy: Any) -> bool:
    """Whether others train the variables of a strategy, too."""
    communicator = communicator_of(strategy)
    if communicator is None:
        return False
    return communicator.world_size > 1 or strategy.extended.servers > 0


def _is_reduced(strategy: Any, variable: Any) -> bool:
    # Without a step, nobody combines the moving statistics.
    is_in_step = replica_step.current().is_in_run or not _is_in_replica_of(strategy)
    return is_in_step and _is_by_rule(strategy) and _is_covered(variable)


def _is_covered(variable: Any) -> bool:
    """Whether its gradient may be among what was reduced."""
    return any(reductions.cover(variable) for reductions in replica_step.reductions())


def _is_by_rule(strategy: Any) -> bool:
    """Whether the optimizer's own step may follow now, by the strategy's update rule."""
    rule = updates_of(strategy)
    is_plain = type(rule) is Updates
    return is_plain or (replica_step.current().is_applying and not rule.replaces_step)


def _is_in_replica_of(strategy: Any) -> bool:
    context = tf.distribute.get_replica_context()
    return context is not None and context.strategy is strategy


def _remember(variable: Any) -> None:
    if tf.executing_eagerly():
        variable._gradring_is_reduced = replica_step.current().is_in_run


def _optimizer_above(variable: Any, *, any_method: bool) -> tuple[Any, Sequence[Any]]:
    """The optimizer that is applying gradients of the variable, and all that it was told.

    A program assigns variables for many reasons, such as to clip them or to copy them. An optimizer
    of several local replicas calls `tf.distribute` from another thread than its entrance, so with
    `any_method` any method of an optimizer counts that is not the program's.
    """
    kinds = _kinds()
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        # A function of a program may be called `apply` as well, and have no parameters.
        first = next(iter(frame.f_code.co_varnames), "")
        is_entrance = frame.f_code.co_name in _ENTRANCES
        if is_entrance or (any_method and first == "self"):
            optimizer = frame.f_locals.get(first)
            if isinstance(optimizer, kinds) and (is_entrance or _is_in_package(frame)):
                told = _told(frame, optimizer)
                those = [each for each in told if id_of(each) == id_of(variable)]
                # These are assigned what a program says is no gradient, such as scales.
                if those and not any(_is_overwritten(each) for each in those):
                    return optimizer, list({id_of(each): each for each in told}.values())
        frame = frame.f_back
    return None, ()


def _told(frame: FrameType, optimizer: Any) -> list[Any]:
    """The variables of an optimizer and of a call of its method.

    A method of the program may have others in its own variables, such as sums of gradients.
    """
    code, values = frame.f_code, frame.f_locals
    names = list(values) if _is_in_package(frame) else code.co_varnames[: code.co_argcount]
    known = keras_names.TRAINED.of(optimizer, None) or ()
    return _variables_in([*(values.get(name) for name in names), list(known)])


def _is_in_package(frame: FrameType) -> bool:
    """Whether it is code of Keras or TensorFlow."""
    return str(frame.f_globals.get("__name__")).partition(".")[0] in TITLES


def _kinds() -> tuple[type, ...]:
    """The bases of all optimizers that have been imported."""
    kinds = [tf.compat.v1.train.Optimizer]
    for name in ("keras", "tf_keras"):
        optimizers = getattr(sys.modules.get(name), "optimizers", None)
        for owner in (optimizers, getattr(optimizers, "legacy", None)):
            kind = getattr(owner, "Optimizer", None)
            kinds += [kind] if isinstance(kind, type) else []
    return tuple(kinds)


def _variables_in(values: Iterable[Any]) -> list[Any]:
    """Variables in lists, and in lists of pairs with their gradients."""
    found = []
    for value in values:
        for each in value if isinstance(value, list | tuple) else ():
            parts = each if isinstance(each, list | tuple) else (each,)
            found += [part for part in parts if hasattr(part, "assign")]
    return found


def _is_overwritten(variable: Any) -> bool:
    return bool(getattr(variable, "overwrite_with_gradient", False))


def _refuse(strategy: Any, optimizer: Any, variables: Sequence[Any]) -> None:
    # Workers of parameter servers form no group, and have a number all the same.
    rank, host = strategy.extended.rank, strategy.communicator.host
    rule = updates_of(strategy)
    names = [name_of(each) for each in variables]
    shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
    name = type(strategy.update_rule).__name__
    rule_of_program = "" if type(rule) is Updates else f" by update={name}"
    if replica_step.current().is_in_run or _is_in_replica_of(strategy):
        advice = (
            "it may assign them by itself, or `gradring env` names a version that was not tried; "
            "reduce by gradring.tensorflow.all_reduce first"
        )
    else:
        advice = (
            "call it inside of strategy.run, or reduce by gradring.tensorflow.GradientReducer "
            "first, or make the model outside of the scope if each rank trains its own"
        )
    raise ConfigError(
        f"rank {rank} of {host}: {type(optimizer).__name__} updates "
        f"{counted(len(names), 'variable')} ({shown}) by gradients that were not reduced"
        f"{rule_of_program}: {advice}",
        rank=rank,
        host=host,
    )
