"""Gradients of models that `given` lets train together, reduced when a tape returns them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import tensorflow as tf

from gradring.tensorflow.graph import compat
from gradring.tensorflow.graph.adoption import replicas_of
from gradring.tensorflow.graph.cross_device_ops import gradients_of
from gradring.tensorflow.graph.dtypes import map_values
from gradring.tensorflow.graph.expressions import is_in_graph
from gradring.tensorflow.graph.extent import extent_in_step
from gradring.tensorflow.graph.extent_rules import CALLS
from gradring.tensorflow.graph.replica_step import Share, current, id_of
from gradring.tensorflow.keras import given
from gradring.tensorflow.keras.given_losses import (
    are_sums,
    own_share,
    slopes_of_loss,
)
from gradring.tensorflow.keras.terms_of_losses import Slope
from gradring.tensorflow.rules.updates import trained_by

_SUM, _MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN


def gradient(
    original: Callable[..., Any],
    tape: Any,
    target: Any,
    sources: Any,
    output_gradients: Any = None,
    unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
) -> Any:
    """Stands in for `tf.GradientTape.gradient`; reduces gradients of variables over all ranks."""
    flat = tf.nest.flatten(sources)
    are_variables = [hasattr(source, "assign") for source in flat]
    targets = tf.nest.flatten(target)
    if not any(are_variables):
        found = original(tape, target, sources, output_gradients, unconnected_gradients)
        return _of_whole_mean(targets, sources, found)
    others, targets, output_gradients = _in_terms(targets, output_gradients)
    is_sum = are_sums(others)
    share = own_share()
    weighs_target = not is_sum and share is not None and not share.is_equal and all(are_variables)
    if weighs_target:
        assert share is not None
        output_gradients = _times(targets, output_gradients, [share.ratio] * len(targets))
    found = tf.nest.flatten(
        original(tape, targets, sources, output_gradients, unconnected_gradients)
    )
    chosen = [
        index
        for index, (is_variable, gradient) in enumerate(zip(are_variables, found, strict=True))
        if is_variable and gradient is not None
    ]
    gradients = [found[index] for index in chosen]
    if weighs_target:
        assert share is not None
        # The mean over no samples is NaN, and so is its product with the share 0.
        without_nan = partial(_unless_nan, share.ratio > 0)
        gradients = [
            each if _adds_up_rows(each) else map_values(without_nan, each) for each in gradients
        ]
    weight = None if is_sum or weighs_target else share
    reduced = _reduced(gradients, [flat[index] for index in chosen], is_sum, weight)
    for index, gradient in zip(chosen, reduced, strict=True):
        found[index] = gradient
    return tf.nest.pack_sequence_as(sources, found)


def _adds_up_rows(gradient: Any) -> bool:
    """Returns whether a gradient is a sum over rows of an unknown number: zeros if it has none.

    The large gradients, those of layers, are sums of this kind, and a pass over them takes time.
    """
    if not is_in_graph(gradient):
        return False
    op = gradient.op
    is_sum = "BackpropFilter" in op.type or (op.type == "MatMul" and op.get_attr("transpose_a"))
    return bool(is_sum and op.inputs[0].shape.rank and op.inputs[0].shape[0] is None)


def _unless_nan(is_number: Any, values: tf.Tensor) -> tf.Tensor:
    return tf.math.multiply_no_nan(values, tf.cast(is_number, values.dtype))


def _of_whole_mean(targets: Sequence[Any], sources: Any, found: Any) -> Any:
    """Divides gradients of this rank's mean, by its own samples, into those of the whole mean."""
    share = own_share()
    are_means = all(extent_in_step(target).is_mean for target in targets)
    if not are_means or share is None or current().has_whole_batch:
        return found
    factor = share.ratio / replicas_of(tf.distribute.get_strategy())

    def scaled(source: Any, gradient: Any) -> Any:
        if not isinstance(gradient, tf.Tensor) or not extent_in_step(source).has_rows:
            return gradient
        whole = gradient * tf.cast(factor, gradient.dtype)
        # It belongs to its sample, although it shrinks with the number of samples.
        current().batch.append(whole)
        return whole

    return tf.nest.map_structure(scaled, sources, found)


def _in_terms(targets: list[Any], slopes: Any) -> tuple[list[Any], list[Any], Any]:
    """Divides targets into terms, if these need different factors.

    Returns:
        The targets and terms that count as a whole mean or sum, all targets and terms, and their
        slopes with the factors.
    """
    slopes_of = [slopes_of_loss(each) for each in targets]
    if not any(slopes_of) and len({extent_in_step(each).is_sum for each in targets}) < 2:
        return targets, targets, slopes
    flat = tf.nest.flatten(slopes) if slopes is not None else [None] * len(targets)
    others, found, of_found, factors = [], [], [], []
    for target, slope, those in zip(targets, flat, slopes_of, strict=True):
        those = those or slopes_of_loss(target, has_others=True) or [Slope(target, 1.0, False)]
        for value, factor, is_whole in those:
            found.append(value)
            of_found.append(None if slope is None else tf.cast(slope, value.dtype))
            factors.append(factor)
            if not is_whole:
                others.append(value)
    return others, found, _times(found, of_found, factors)


def _times(targets: Sequence[Any], slopes: Any, factors: Sequence[Any]) -> list[Any]:
    """Returns `slopes` times factors; a slope of None counts as ones."""
    flat = tf.nest.flatten(slopes) if slopes is not None else [None] * len(targets)
    ones = [
        tf.ones_like(target) if slope is None else slope
        for target, slope in zip(targets, flat, strict=True)
    ]
    return [
        tf.cast(factor, slope.dtype) * slope for slope, factor in zip(ones, factors, strict=True)
    ]


def _reduced(
    gradients: Sequence[Any], variables: Sequence[Any], is_sum: bool, share: Share | None
) -> list[Any]:
    """Returns the gradients of all samples; first weighs this rank's ones by its share, if any."""
    if not gradients:
        return []
    if share is not None and not share.is_equal:
        size = share.ratio
        gradients = [
            map_values(lambda v: tf.math.multiply_no_nan(v, tf.cast(size, v.dtype)), each)
            for each in gradients
        ]
    for each in gradients:
        _warn_if_added_up(each)
    context = tf.distribute.get_replica_context()
    with gradients_of(list(variables)):
        reduced = context.all_reduce(_SUM if is_sum else _MEAN, list(gradients))
    current().reductions.note_gradients(variables)
    graph = tf.compat.v1.get_default_graph()
    _reduced_in.setdefault(graph, set()).update(id_of(variable) for variable in variables)
    return list(reduced)


#: For each graph, `id_of` the variables whose gradients are reduced in it.
_reduced_in: WeakKeyDictionary[tf.Graph, set[int]] = WeakKeyDictionary()


def _is_reduced_in_function(gradient: Any, variable: Any) -> bool:
    """Returns whether a gradient is the output of a `tf.function` that reduces it.

    The function may have been traced for an earlier step, so its graph is searched.
    """
    own = _values_of(gradient)
    if not is_in_graph(own):
        return False
    ahead = [own.op]
    while ahead:
        op = ahead.pop()
        if op.type == "Identity":
            ahead.append(op.inputs[0].op)
            continue
        for graph in compat.called_graphs(op):
            if id_of(variable) in _reduced_in.get(graph, ()):
                return True
            ahead += [inner for inner in graph.get_operations() if inner.type in CALLS]
    return False


def _warn_if_added_up(gradient: Any) -> None:
    """Warns on rank 0 if an eager gradient has each row once, so duplicates may have been summed.

    The ranks' rows together may then hold duplicates, which one process would also have summed.
    """
    indices = getattr(gradient, "indices", None)
    if indices is None or tf.is_symbolic_tensor(indices):
        return
    if len(np.unique(indices)) == len(indices) > 1:
        given.warn_once(
            "eager rows",
            "a gradient has each row once on this rank, as that of a sparse batch. In an eager "
            "step it is unknown whether one process would add up the rows of all samples, so "
            "optimizers such as Adam may train differently (GRADRING_WITH_STRATEGY); leave out "
            "run_eagerly=True",
        )


def apply(
    original: Callable[..., Any], optimizer: Any, grads: Any, trainable_variables: Any = None
) -> Any:
    """Stands in for `Optimizer.apply`; reduces the gradients that no tape has reduced."""
    if trainable_variables is not None:
        trainable_variables = list(trainable_variables)
    grads = list(grads)
    if trainable_variables and not optimizer.built:
        with given.outside():
            optimizer.build(trainable_variables)
    variables = trainable_variables or (trained_by(optimizer) if optimizer.built else ())
    reductions = current().reductions
    chosen = [
        index
        for index, (gradient, variable) in enumerate(zip(grads, variables, strict=False))
        if gradient is not None
        and not reductions.has_gradient_of(variable)
        and not _is_reduced_in_function(gradient, variable)
    ]
    sums = [index for index in chosen if are_sums([_values_of(grads[index])])]
    means = [index for index in chosen if index not in sums]
    for indices, is_sum, share in ((sums, True, None), (means, False, own_share())):
        those = [variables[index] for index in indices]
        reduced = _reduced([grads[index] for index in indices], those, is_sum, share)
        for index, gradient in zip(indices, reduced, strict=True):
            grads[index] = gradient
    # The optimizer sees one replica, so it applies the reduced gradients as one process would.
    with given.outside():
        return original(optimizer, grads, trainable_variables)


def _values_of(gradient: Any) -> Any:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def add_variable(original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for `Optimizer.add_variable`; makes the variable outside of the strategy."""
    with given.outside():
        return original(optimizer, *args, **kwargs)


def apply_outside(original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for `Optimizer.apply` outside of Keras' loops; warns that ranks train alone."""
    world_size = given.strategy().communicator.world_size
    if world_size > 1:
        given.warn_once(
            f"outside {id(optimizer)}",
            "the optimizer %r applies gradients outside of Keras' fit and train_on_batch: each of "
            "%d ranks does all of this work by itself (GRADRING_WITH_STRATEGY); train in fit, or "
            "reduce the gradients by gradring.tensorflow.GradientReducer",
            getattr(optimizer, "name", type(optimizer).__name__),
            world_size,
        )
    return original(optimizer, *args, **kwargs)
