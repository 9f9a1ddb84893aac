"""Adoption of Keras variables that were made outside of the strategy's scope.

TensorFlow's guides make the model inside the scope, but often make the optimizer and the metrics,
or call `compile`, outside of it.
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
    """Returns the strategy's scope, or a null context where the scope must not be entered again.

    Code inside the scope or inside `run` has entered it already. A program with a given strategy
    (`keras/given.py`) knows of no strategy and runs outside of every scope.
    """
    if is_given(strategy):
        return contextlib.nullcontext()
    if tf.distribute.has_strategy() and tf.distribute.get_strategy() is strategy:
        return contextlib.nullcontext()
    return strategy.scope()  # type: ignore[no-any-return]


def communicator_of(strategy: tf.distribute.Strategy | None) -> Communicator | None:
    """Returns the communicator of one of our strategies; None for any other strategy."""
    found = getattr(strategy, "communicator", None)
    return found if isinstance(found, Communicator) else None


def replicas_of(strategy: tf.distribute.Strategy) -> int:
    """Returns the number of replicas, also for a given strategy, which reports 1 to its program."""
    found = getattr(strategy.extended, "replicas", None)
    return strategy.num_replicas_in_sync if found is None else int(found)


def is_given(strategy: tf.distribute.Strategy | None) -> bool:
    """Returns whether gradring gave this strategy to a program that has none (`keras/given.py`)."""
    return bool(getattr(strategy, "is_given", False))


def of_tensorflow(variable: Any) -> Any:
    """Returns the `tf.Variable` that a Keras 3 variable wraps; a `tf.Variable` is returned as is.

    `value` of a `tf.Variable` is a method; `value` of a Keras 3 variable is the wrapped variable.
    """
    value = getattr(variable, "value", None)
    return variable if value is None or callable(value) else value


def strategy_of(variables: Iterable[Any]) -> tf.distribute.Strategy | None:
    """Returns the strategy in whose scope the first variable was made, or None."""
    for variable in variables:
        return getattr(keras_names.VALUE.of(variable, variable), "distribute_strategy", None)
    return None


def adopt(variables: Iterable[Any], strategy: tf.distribute.Strategy) -> None:
    """Makes Keras variables without a strategy variables of this one, with the chief's values.

    Every rank must call it with the same variables.
    """
    for variable in variables:
        # A Keras variable wraps no TensorFlow variable before it is built.
        plain = keras_names.VALUE.of(variable, None)
        is_of_this = getattr(plain, "distribute_strategy", None) is strategy
        if plain is None or is_of_this or isinstance(plain, compat.DistributedValues):
            continue
        with tf.init_scope(), scope_of(strategy):
            keras_names.INITIALIZE.of(variable)(plain.numpy())
