"""The variables of models, optimizers and checkpoints, whichever Keras they are of."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from gradring.errors import ConfigError
from gradring.tensorflow.graph.adoption import of_tensorflow, scope_of, strategy_of
from gradring.tensorflow.seams import keras_names


def check_built(model: Any, before: str) -> None:
    """Refuses a Keras model that has no variables yet.

    One of a class of its own may call itself built by then: its layers are when they are called.

    Raises:
        gradring.errors.ConfigError: It has none; says to build it `before` something.
    """
    layers, weights = getattr(model, "layers", ()), getattr(model, "weights", True)
    has_none = not weights and not all(layer.built for layer in layers)
    if has_none or not getattr(model, "built", True):
        raise ConfigError(
            f"the model {model.name!r} has no variables yet; build it in the strategy's scope, for "
            f"instance by calling it on a batch, before {before}"
        )


def is_built(optimizer: Any) -> bool:
    """Whether an optimizer has its variables, or is of a kind that makes them by itself."""
    # The sign of tf_keras is not there before.
    built = getattr(optimizer, "built", getattr(optimizer, "_built", False))
    return bool(built) or not hasattr(optimizer, "build")


def build(optimizer: Any, model: Any, variables: Iterable[Any] = ()) -> None:
    """Makes the variables of an optimizer, unless there is none, or it has them.

    It is built for what is trained of `model`, or if that is None, of `variables`.
    """
    if is_built(optimizer):
        return
    those = [variable for variable in variables if variable.trainable]
    trained = those if model is None else model.trainable_variables
    strategy = getattr(model, "distribute_strategy", strategy_of(trained))
    with contextlib.nullcontext() if strategy is None else scope_of(strategy):
        optimizer.build(trained)


def optimizers_of(model: Any) -> Iterator[Any]:
    """The optimizers of a Keras model and of the models in it.

    A model has that which it was compiled with, and each that is an attribute, as those of a GAN
    are. Keras saves all of them.

    Yields:
        Each once, in an order that is the same on every rank.
    """
    found: dict[int, Any] = {}
    for part in keras_names.FLATTEN_LAYERS.of(model, lambda: [model])():
        for value in (getattr(part, "optimizer", None), *vars(part).values()):
            values = list(value.values()) if isinstance(value, Mapping) else value
            for each in values if isinstance(values, (list, tuple)) else [values]:
                if hasattr(each, "apply_gradients"):
                    found.setdefault(id(each), each)
    yield from found.values()


def variables_of(model: Any) -> Iterator[Any]:
    """Those of a Keras model and its optimizers without its metrics, of a module or a checkpoint.

    Yields:
        Each once, in an order that is the same on every rank.
    """
    if hasattr(model, "load_weights"):
        metrics = {id(variable) for variable in getattr(model, "metrics_variables", ())}
        yield from (variable for variable in model.variables if id(variable) not in metrics)
        for optimizer in optimizers_of(model):
            yield from optimizer_variables(optimizer)
        return
    root = model if isinstance(model, tf.train.Checkpoint) else tf.train.Checkpoint(model)
    for part in tf.train.TrackableView(root).descendants():
        # Of Keras 3 they are no `tf.Variable`s; its optimizers can assign, too.
        if hasattr(part, "assign") and hasattr(part, "shape"):
            yield part


def raw_variables_of(model: Any) -> Iterator[tf.Variable]:
    """Variables of TensorFlow that layers of a Keras model have as attributes.

    Keras 3 does not count them among the model's.

    Yields:
        Each once, in an order that is the same on every rank.
    """
    known = {id(of_tensorflow(variable)) for variable in variables_of(model)}
    for layer in keras_names.FLATTEN_LAYERS.of(model, lambda: [model])():
        for value in vars(layer).values():
            values = list(value.values()) if isinstance(value, Mapping) else value
            for each in values if isinstance(values, (list, tuple)) else [values]:
                if isinstance(each, tf.Variable) and id(each) not in known:
                    known.add(id(each))
                    yield each


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
