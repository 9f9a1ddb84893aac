"""The variables of models, optimizers and checkpoints, whichever Keras they are of."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from gradring.errors import ConfigError
from gradring.tensorflow.adoption import of_tensorflow


def check_built(model: Any, before: str) -> None:
    """Refuses a Keras model that has no variables yet.

    Raises:
        gradring.errors.ConfigError: It has none; says to build it `before` something.
    """
    if not getattr(model, "built", True):
        raise ConfigError(
            f"the model {model.name!r} has no variables yet; build it, for instance by calling it "
            f"on a batch, before {before}"
        )


def build(optimizer: Any, model: Any) -> None:
    """Makes the variables of an optimizer, unless there is none, or it has them."""
    # The sign of tf_keras is not there before.
    if getattr(optimizer, "built", getattr(optimizer, "_built", False)):
        return
    if not hasattr(optimizer, "build"):
        return
    strategy = getattr(model, "distribute_strategy", None)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        optimizer.build(model.trainable_variables)


def variables_of(model: Any) -> Iterator[Any]:
    """Those of a Keras model and its optimizer without its metrics, of a module or a checkpoint.

    Yields:
        Each once, in an order that is the same on every rank.
    """
    if hasattr(model, "load_weights"):
        metrics = {id(variable) for variable in getattr(model, "metrics_variables", ())}
        yield from (variable for variable in model.variables if id(variable) not in metrics)
        yield from optimizer_variables(getattr(model, "optimizer", None))
        return
    root = model if isinstance(model, tf.train.Checkpoint) else tf.train.Checkpoint(model)
    for part in tf.train.TrackableView(root).descendants():
        # Of Keras 3 they are no `tf.Variable`s; its optimizers can assign, too.
        if hasattr(part, "assign") and hasattr(part, "shape"):
            yield part


def optimizer_variables(optimizer: Any) -> Sequence[Any]:
    """Those of an optimizer, if there is one."""
    variables = () if optimizer is None else optimizer.variables
    # A method in tf_keras.
    found: Sequence[Any] = variables() if callable(variables) else variables
    return found


def local_parts(variable: Any) -> Sequence[Any]:
    """The variables of this process behind one of a strategy, whose values no reading adds up."""
    inner = of_tensorflow(variable)
    return getattr(inner, "values", None) or [inner]
