"""Keras' variables that were made outside of the strategy's scope, such as an optimizer's.

Guides make the model in the scope, and compile it, or make its optimizer and metrics, outside.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from gradring.group.communicator import Communicator
from gradring.tensorflow.graph import compat
from gradring.tensorflow.seams import keras_names


def scope_of(strategy: tf.distribute.Strategy) -> contextlib.AbstractContextManager[Any]:
    """The strategy's scope, unless the program is in it, also by `run`, or knows of none."""
    if is_given(strategy):
        return contextlib.nullcontext()
    if tf.distribute.has_strategy() and tf.distribute.get_strategy() is strategy:
        return contextlib.nullcontext()
    return strategy.scope()  # type: ignore[no-any-return]


def communicator_of(strategy: tf.distribute.Strategy | None) -> Communicator | None:
    """The communicator of a strategy of ours; None for any other."""
    found = getattr(strategy, "communicator", None)
    return found if isinstance(found, Communicator) else None


def replicas_of(strategy: tf.distribute.Strategy) -> int:
    """How many replicas a strategy has, also one that shows a program one of them."""
    found = getattr(strategy.extended, "replicas", None)
    return strategy.num_replicas_in_sync if found is None else int(found)


def is_given(strategy: tf.distribute.Strategy | None) -> bool:
    """Whether a strategy was given to a program that knows of no replicas."""
    return bool(getattr(strategy, "is_given", False))


def of_tensorflow(variable: Any) -> Any:
    """The variable itself, whose `value` is a function, or the one that Keras 3 has wrapped."""
    value = getattr(variable, "value", None)
    return variable if value is None or callable(value) else value


def strategy_of(variables: Iterable[Any]) -> tf.distribute.Strategy | None:
    """The strategy in whose scope the first variable was made, or None."""
    for variable in variables:
        return getattr(keras_names.VALUE.of(variable, variable), "distribute_strategy", None)
    return None


def adopt(variables: Iterable[Any], strategy: tf.distribute.Strategy) -> None:
    """Gives Keras' variables that belong to no strategy to this one, with the chief's values.

    Every rank must call it with the same variables.
    """
    for variable in variables:
        # What TensorFlow calls a variable; Keras' has none before it is built.
        plain = keras_names.VALUE.of(variable, None)
        if plain is None or isinstance(plain, compat.DistributedValues):
            continue
        with tf.init_scope(), scope_of(strategy):
            keras_names.INITIALIZE.of(variable)(plain.numpy())
