"""Variables of models, optimizers and checkpoints, for Keras 3 and for tf_keras."""

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

    A subclassed model can report `built` too early, so its layers are checked as well: a layer is
    built by its first call.

    Raises:
        gradring.errors.ConfigError: The model has none. The message says to build it `before`
            something.
    """
    layers, weights = getattr(model, "layers", ()), getattr(model, "weights", True)
    has_none = not weights and not all(layer.built for layer in layers)
    if has_none or not getattr(model, "built", True):
        raise ConfigError(
            f"the model {model.name!r} has no variables yet; build it in the strategy's scope, for "
            f"instance by calling it on a batch, before {before}"
        )


def is_built(optimizer: Any) -> bool:
    """Returns whether an optimizer has its variables, or is of a kind that makes them by itself."""
    # An optimizer of tf_keras has `_built` only once it is built.
    built = getattr(optimizer, "built", getattr(optimizer, "_built", False))
    return bool(built) or not hasattr(optimizer, "build")


def build(optimizer: Any, model: Any, variables: Iterable[Any] = ()) -> None:
    """Makes the variables of an optimizer; does nothing for None and for a built optimizer.

    They belong to the trainable variables of `model`, or of `variables` if `model` is None.
    """
    if is_built(optimizer):
        return
    those = [variable for variable in variables if variable.trainable]
    trained = those if model is None else model.trainable_variables
    strategy = getattr(model, "distribute_strategy", strategy_of(trained))
    with contextlib.nullcontext() if strategy is None else scope_of(strategy):
        optimizer.build(trained)


def optimizers_of(model: Any) -> Iterator[Any]:
    """Yields the optimizers of a Keras model and of the models in it.

    A model has the optimizer that it was compiled with, and the optimizers in its attributes, such
    as those of a GAN. Keras saves all of them.

    Yields:
        Each optimizer once, in the same order on every rank.
    """
    found = {id(each): each for each in _attributes(model) if hasattr(each, "apply_gradients")}
    yield from found.values()


def _attributes(model: Any) -> Iterator[Any]:
    """Yields the attributes of all layers of a Keras model, one by one those in lists and dicts."""
    for layer in keras_names.FLATTEN_LAYERS.of(model, lambda: [model])():
        for value in (getattr(layer, "optimizer", None), *vars(layer).values()):
            values = list(value.values()) if isinstance(value, Mapping) else value
            yield from values if isinstance(values, (list, tuple)) else [values]


def variables_of(model: Any) -> Iterator[Any]:
    """Yields the variables of a Keras model and its optimizers, of a module or of a checkpoint.

    Metrics of a Keras model are left out.

    Yields:
        Each variable once, in the same order on every rank.
    """
    if hasattr(model, "load_weights"):
        metrics = {id(variable) for variable in getattr(model, "metrics_variables", ())}
        yield from (variable for variable in model.variables if id(variable) not in metrics)
        for optimizer in optimizers_of(model):
            yield from optimizer_variables(optimizer)
        return
    root = model if isinstance(model, tf.train.Checkpoint) else tf.train.Checkpoint(model)
    for part in tf.train.TrackableView(root).descendants():
        # A Keras 3 variable is no `tf.Variable`. A Keras 3 optimizer has `assign`, but no `shape`.
        if hasattr(part, "assign") and hasattr(part, "shape"):
            yield part


def raw_variables_of(model: Any) -> Iterator[tf.Variable]:
    """Yields the TensorFlow variables that layers of a Keras model have as attributes.

    Keras 3 does not count them among the model's variables.

    Yields:
        Each variable once, in the same order on every rank.
    """
    known = {id(of_tensorflow(variable)) for variable in variables_of(model)}
    for each in _attributes(model):
        if isinstance(each, tf.Variable) and id(each) not in known:
            known.add(id(each))
            yield each


def optimizer_variables(optimizer: Any) -> Sequence[Any]:
    """Returns the variables of an optimizer; none if the optimizer is None."""
    variables = () if optimizer is None else optimizer.variables
    # `variables` is a method in tf_keras.
    found: Sequence[Any] = variables() if callable(variables) else variables
    return found


def local_parts(variable: Any) -> Sequence[Any]:
    """Returns this process's own variables behind a variable of a strategy.

    Their values are local; a read of the strategy's variable can add up the parts of all ranks.
    """
    inner = of_tensorflow(variable)
    return getattr(inner, "values", None) or [inner]
