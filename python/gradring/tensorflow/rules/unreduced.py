"""Refusal of optimizers that update variables by gradients that no collective has reduced.

The ranks would train different models without an error. This happens in a loop without
`strategy.run`, with an optimizer that assigns variables by itself, or with a version of Keras or
TensorFlow that no longer calls our functions. So the updates that the strategy sees are compared
with the reductions of the step. A correct program must never be refused, so uncertain cases pass.

The check runs while a function is traced, and in eager steps until a variable has been checked.
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

#: Methods by which a program passes gradients to an optimizer.
_ENTRANCES = {"apply", "apply_gradients", "tf__apply", "tf__apply_gradients"}

#: Number of variables that a message names.
_SHOWN = 2


@_optional()
def note_update(strategy: Any, variable: Any, args: Iterable[Any]) -> None:
    """Checks an update of a variable by `tf.distribute`, which passes these arguments to it.

    Raises:
        gradring.errors.ConfigError: An optimizer updates it by a gradient that no collective has
            reduced.
    """
    # Updates without gradients pass: weight decay has no arguments, averages have variables.
    gradients = [arg for arg in args if tf.is_tensor(arg) and not hasattr(arg, "assign")]
    if gradients:
        _note(strategy, variable, gradients)


@_optional()
def note_assignment(variable: Any) -> None:
    """Checks an assignment of a replica's own copy of a variable, as `note_update` does."""
    _note(variable.distribute_strategy, variable, None)


@_optional()
def check(step: ReplicaStep) -> None:
    """Checks, at the end of a step, the variables that optimizers assigned by themselves.

    Raises:
        gradring.errors.ConfigError: As for `note_update`.
    """
    for variable, optimizer, updates in step.assigned:
        strategy = variable.distribute_strategy
        if updates is not None and updates == _updates(optimizer):
            continue  # The optimizer has only added up gradients.
        if not _is_covered(variable):
            assigned = [each for each, by, _ in step.assigned if by is optimizer]
            _refuse(strategy, optimizer, [each for each in assigned if not _is_covered(each)])
        _remember(variable)


def _updates(optimizer: Any) -> int | None:
    """Returns how often an eager optimizer that accumulates gradients has updated variables.

    Returns None for other optimizers. Keras applies constraints in all steps, and reduces gradients
    only in those that update variables.
    """
    if not tf.executing_eagerly() or not getattr(optimizer, "gradient_accumulation_steps", None):
        return None
    return int(optimizer.iterations.numpy())


def _note(strategy: Any, variable: Any, gradients: Sequence[Any] | None) -> None:
    if not getattr(variable, "trainable", False) or not _is_shared(strategy):
        return
    step = replica_step.current()
    if tf.executing_eagerly() and getattr(variable, "_gradring_is_reduced", None) == step.is_in_run:
        return
    if step.is_broadcast or step.is_alone:
        return
    # Several local replicas are threads, and a thread does not know the reductions of all.
    if gradients is None and len(strategy.extended.worker_devices) > 1:
        return
    optimizer, variables = _optimizer_above(variable, any_method=gradients is not None)
    if optimizer is None:
        return
    if gradients is None and step.is_in_run:
        # Checked at the step's end: the optimizer may assign before it reduces, as for a decay.
        step.assigned.append((variable, optimizer, _updates(optimizer)))
    elif _is_reduced(strategy, variable):
        _remember(variable)
    elif not _are_zero(gradients):
        _refuse(
            strategy, optimizer, [each for each in variables if not _is_reduced(strategy, each)]
        )


def _are_zero(gradients: Sequence[Any] | None) -> bool:
    """Returns whether eager gradients are zero, as those of a call that only makes slots."""
    if gradients is None or not tf.executing_eagerly():
        return False
    return not any(np.any(tf.convert_to_tensor(each).numpy()) for each in gradients)


def _is_shared(strategy: Any) -> bool:
    """Returns whether other processes also train the variables of a strategy."""
    communicator = communicator_of(strategy)
    if communicator is None:
        return False
    return communicator.world_size > 1 or strategy.extended.servers > 0


def _is_reduced(strategy: Any, variable: Any) -> bool:
    # In a replica, gradients must be reduced in a step, which also combines moving statistics.
    is_in_step = replica_step.current().is_in_run or not _is_in_replica_of(strategy)
    return is_in_step and _is_by_rule(strategy) and _is_covered(variable)


def _is_covered(variable: Any) -> bool:
    """Returns whether the gradient of a variable may have been reduced."""
    return any(reductions.cover(variable) for reductions in replica_step.reductions())


def _is_by_rule(strategy: Any) -> bool:
    """Returns whether the strategy's update rule allows the optimizer's own step now."""
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
    """Returns the optimizer on the call stack that updates a variable, and its variables.

    Returns None if there is no such optimizer: a program assigns variables for many reasons, such
    as to clip or copy them. An optimizer of several local replicas calls `tf.distribute` from
    another thread than its entrance. So with `any_method`, any method of an optimizer counts that
    is code of Keras or TensorFlow.
    """
    kinds = _kinds()
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        # A function of the program may also be called `apply`, and may have no parameters.
        first = next(iter(frame.f_code.co_varnames), "")
        is_entrance = frame.f_code.co_name in _ENTRANCES
        if is_entrance or (any_method and first == "self"):
            optimizer = frame.f_locals.get(first)
            if isinstance(optimizer, kinds) and (is_entrance or _is_in_package(frame)):
                variables = _variables_of(frame, optimizer)
                those = [each for each in variables if id_of(each) == id_of(variable)]
                # Their "gradients" are new values, such as scales of quantized layers.
                if those and not any(_is_overwritten(each) for each in those):
                    return optimizer, list({id_of(each): each for each in variables}.values())
        frame = frame.f_back
    return None, ()


def _variables_of(frame: FrameType, optimizer: Any) -> list[Any]:
    """Returns the variables of an optimizer, and of the arguments of a call of its method.

    The local variables of a method of the program may hold other variables, such as sums of
    gradients, so only those of Keras and TensorFlow are searched.
    """
    code, values = frame.f_code, frame.f_locals
    names = list(values) if _is_in_package(frame) else code.co_varnames[: code.co_argcount]
    known = keras_names.TRAINED.of(optimizer, None) or ()
    return _variables_in([*(values.get(name) for name in names), list(known)])


def _is_in_package(frame: FrameType) -> bool:
    """Returns whether a frame runs code of Keras or TensorFlow."""
    return str(frame.f_globals.get("__name__")).partition(".")[0] in TITLES


def _kinds() -> tuple[type, ...]:
    """Returns the base classes of all optimizers that have been imported."""
    kinds = [tf.compat.v1.train.Optimizer]
    for name in ("keras", "tf_keras"):
        optimizers = getattr(sys.modules.get(name), "optimizers", None)
        for owner in (optimizers, getattr(optimizers, "legacy", None)):
            kind = getattr(owner, "Optimizer", None)
            kinds += [kind] if isinstance(kind, type) else []
    return tuple(kinds)


def _variables_in(values: Iterable[Any]) -> list[Any]:
    """Returns the variables in lists, and in lists of pairs of gradients and variables."""
    found = []
    for value in values:
        for each in value if isinstance(value, list | tuple) else ():
            parts = each if isinstance(each, list | tuple) else (each,)
            found += [part for part in parts if hasattr(part, "assign")]
    return found


def _is_overwritten(variable: Any) -> bool:
    return bool(getattr(variable, "overwrite_with_gradient", False))


def _refuse(strategy: Any, optimizer: Any, variables: Sequence[Any]) -> None:
    # Workers of parameter servers form no group, but each has a rank.
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
