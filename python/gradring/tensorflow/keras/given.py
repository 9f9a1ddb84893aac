"""Models of a program that knows of no replicas, which all ranks train as one process would.

`stand_ins.given_strategy` gives these models a strategy. The program keeps plain TensorFlow
variables and sees one replica: Keras divides no loss by the number of replicas, and no scope
surrounds the program's code. The strategy acts only inside of Keras' loops, where it divides the
batches.

Each rank computes its part of a mean over all samples, weighed by its share of the samples:

* Gradients are reduced when a tape returns them. A `train_step` that clips them therefore clips the
  same gradients as one process would. The optimizer reduces gradients that no tape returned.
* A sum over samples is added up instead of averaged. A loss is a sum if Keras says so, or if the
  loss's graph shows it (`graph.extent`).
* A metric counts the samples of its rank. Its variables are added up when the metric is read.

Each function that takes an `original` stands in for one of Keras or TensorFlow; `compat_keras.py`
says where.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import tensorflow as tf

from gradring.gradients.replicas import hash_of
from gradring.group.require_equal import gather_if_different
from gradring.tensorflow.graph import compat
from gradring.tensorflow.graph.adoption import communicator_of, is_given, replicas_of
from gradring.tensorflow.graph.cross_device_ops import gradients_of
from gradring.tensorflow.graph.dtypes import map_values
from gradring.tensorflow.graph.extent import CALLS, Extent, extent_of, is_in_graph, reads
from gradring.tensorflow.graph.model_variables import variables_of
from gradring.tensorflow.graph.ops import broadcast_variables
from gradring.tensorflow.graph.replica_step import Share, current, id_of
from gradring.tensorflow.keras.inseparable_losses import problem_of
from gradring.tensorflow.replicas import contents
from gradring.tensorflow.rules.updates import trained_by
from gradring.tensorflow.seams import keras_names

_log = logging.getLogger("gradring")

_SUM, _MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN

_strategy: Any = None
#: TensorFlow's default replica context, in which code outside of any strategy runs.
_context_outside: Any = None
_warned: set[str] = set()


def give(strategy: Any) -> None:
    """Makes Keras models without a strategy train by this one, from now on."""
    global _strategy, _context_outside
    _strategy, _context_outside = strategy, tf.distribute.get_replica_context()
    compat.replace(
        {"GradientTape.gradient": gradient}, applies=lambda *_: is_in_step(), traced=True
    )


def strategy() -> Any:
    """The strategy that the program was given, or None."""
    return _strategy


def is_in_step(*_: Any) -> bool:
    """Returns whether the code runs in a step of a replica of the given strategy."""
    if _strategy is None or not current().is_in_run:
        return False
    context = tf.distribute.get_replica_context()
    return context is not None and context.strategy is _strategy


def is_outside(*_: Any) -> bool:
    """Returns whether the program was given a strategy, and no scope or step surrounds the code."""
    is_in_run = current().is_in_run
    return _strategy is not None and not is_in_run and not tf.distribute.has_strategy()


# Loops


def joining(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for functions that compile or begin a loop; adds the model to the strategy."""
    if keras_names.MODEL_STRATEGY.of(model, None) is None:
        keras_names.MODEL_STRATEGY.set(model, _strategy)
    return original(model, *args, **kwargs)


def compiling(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for `compile`; turns XLA off, which has no kernels for collectives."""
    if kwargs.get("jit_compile") is True and _strategy.communicator.world_size > 1:
        kwargs["jit_compile"] = False
        if _strategy.communicator.rank == 0:
            _warn_once(
                "jit_compile",
                "jit_compile=True is left out, as XLA has no kernels for reductions between ranks "
                "(GRADRING_WITH_STRATEGY)",
            )
    return joining(original, model, *args, **kwargs)


def begins_equal(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for a loop of Keras; first gives the model's variables the values of rank 0."""
    give_values_of_chief(model)
    return original(model, *args, **kwargs)


def give_values_of_chief(model: Any) -> None:
    """Broadcasts the variables of rank 0 if any differ between ranks; all ranks must call it."""
    communicator = communicator_of(model.distribute_strategy)
    if communicator is None or communicator.world_size == 1:
        return
    variables = [*variables_of(model), *getattr(model, "metrics_variables", ())]
    hashes = np.array([hash_of(contents(each)) for each in variables], np.int64)
    if gather_if_different(communicator, hashes.tobytes(), "variables of a model") is not None:
        broadcast_variables(variables, 0, communicator)


def are_of_loop(batches: Any) -> bool:
    """Returns whether batches come from a (distributed) iterator, as those of `fit` do."""
    return isinstance(batches, (tf.data.Iterator, tf.distribute.DistributedIterator))


def part_of_batch(data: Any) -> tuple[Any, int | None]:
    """Returns this rank's rows of a batch that every rank has, and the batch's number of rows.

    If the batch has leaves that are no tensors, or tensors with different numbers of rows, returns
    the whole batch and None. If the batch has fewer rows than there are ranks, some ranks get none.
    """
    communicator = _strategy.communicator
    leaves = [leaf for leaf in tf.nest.flatten(data) if leaf is not None]
    sizes = {_rows(leaf) for leaf in leaves}
    if len(sizes) != 1:
        return data, None
    (size,) = sizes
    if not size:
        return data, None
    begin, end = ((communicator.rank + more) * size // communicator.world_size for more in (0, 1))
    return tf.nest.map_structure(lambda leaf: None if leaf is None else leaf[begin:end], data), size


def _rows(leaf: Any) -> int | None:
    if isinstance(leaf, (np.ndarray, tf.Tensor)) and leaf.shape:
        return int(leaf.shape[0])
    return None


# Gradients


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
    is_sum = _is_sum(targets)
    share = own_share()
    weighs_target = not is_sum and share is not None and not share.is_equal and all(are_variables)
    if weighs_target:
        assert share is not None
        output_gradients = _weighed(targets, output_gradients, share)
    found = tf.nest.flatten(
        original(tape, target, sources, output_gradients, unconnected_gradients)
    )
    chosen = [
        index
        for index, (is_variable, gradient) in enumerate(zip(are_variables, found, strict=True))
        if is_variable and gradient is not None
    ]
    gradients = [found[index] for index in chosen]
    weight = None if is_sum or weighs_target else share
    reduced = _reduced(gradients, [flat[index] for index in chosen], is_sum, weight)
    for index, gradient in zip(chosen, reduced, strict=True):
        found[index] = gradient
    return tf.nest.pack_sequence_as(sources, found)


def _of_whole_mean(targets: Sequence[Any], sources: Any, found: Any) -> Any:
    """Divides gradients of this rank's mean, by its own samples, into those of the whole mean."""
    share = own_share()
    are_means = all(_extent(target).is_mean for target in targets)
    if not are_means or share is None or current().has_whole_batch:
        return found
    factor = share.ratio / replicas_of(tf.distribute.get_strategy())

    def scaled(source: Any, gradient: Any) -> Any:
        if not isinstance(gradient, tf.Tensor) or not _extent(source).has_rows:
            return gradient
        whole = gradient * tf.cast(factor, gradient.dtype)
        # It belongs to its sample, although it shrinks with the number of samples.
        current().batch.append(whole)
        return whole

    return tf.nest.map_structure(scaled, sources, found)


def _weighed(targets: Sequence[Any], slopes: Any, share: Share) -> list[Any]:
    """Returns `slopes` times this rank's share of the samples; a slope of None counts as ones."""
    given = tf.nest.flatten(slopes) if slopes is not None else [None] * len(targets)
    return [
        tf.cast(share.ratio, target.dtype) * (tf.ones_like(target) if slope is None else slope)
        for target, slope in zip(targets, given, strict=True)
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
    if indices is None or tf.is_symbolic_tensor(indices) or _strategy.communicator.rank > 0:
        return
    if len(np.unique(indices)) == len(indices) > 1:
        _warn_once(
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
        with _context_outside:
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
    sums = [index for index in chosen if _is_sum([_values_of(grads[index])])]
    means = [index for index in chosen if index not in sums]
    for indices, is_sum, share in ((sums, True, None), (means, False, own_share())):
        those = [variables[index] for index in indices]
        reduced = _reduced([grads[index] for index in indices], those, is_sum, share)
        for index, gradient in zip(indices, reduced, strict=True):
            grads[index] = gradient
    # The optimizer sees one replica, so it applies the reduced gradients as one process would.
    with _context_outside:
        return original(optimizer, grads, trainable_variables)


def _values_of(gradient: Any) -> Any:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def add_variable(original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for `Optimizer.add_variable`; makes the variable outside of the strategy."""
    with _context_outside:
        return original(optimizer, *args, **kwargs)


def apply_outside(original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for `Optimizer.apply` outside of Keras' loops; warns that ranks train alone."""
    communicator = _strategy.communicator
    if communicator.rank == 0 and communicator.world_size > 1:
        _warn_once(
            f"outside {id(optimizer)}",
            "the optimizer %r applies gradients outside of Keras' fit and train_on_batch: each of "
            "%d ranks does all of this work by itself (GRADRING_WITH_STRATEGY); train in fit, or "
            "reduce the gradients by gradring.tensorflow.GradientReducer",
            getattr(optimizer, "name", type(optimizer).__name__),
            communicator.world_size,
        )
    return original(optimizer, *args, **kwargs)


# Losses and logs


def own_share() -> Share | None:
    """Returns this rank's share of the samples, or None if it is unknown.

    A `tf.function` in a step reads the share from a variable, because other graphs may call it.
    """
    share = current().share
    if share is None or compat.can_take(share.ratio):
        return share
    if not is_in_step() or share.is_equal:
        return None
    return share._replace(ratio=_share_of_step().read_value())


def note_share(share: Share) -> None:
    """Stores this rank's share of the samples at the start of a step, for `own_share`."""
    with tf.device("/device:CPU:0"):
        _share_of_step().assign(share.ratio)


@functools.cache
def _share_of_step() -> tf.Variable:
    return compat.plain_variable(1, "share", tf.float64)


def mean_of_keras(loss: tf.Tensor, factor: tf.Tensor | None) -> tf.Tensor:
    """Notes a loss of Keras as a mean over samples, and multiplies it by `factor`, if any.

    The factor corrects a mean that is not divided by the number of samples, such as a masked one.
    """
    if is_in_graph(loss) and (extent := _extent(loss)).is_paired:
        _warn_unless_mean(loss, extent)
    if factor is not None:
        loss = loss * tf.cast(factor, loss.dtype)
    return _as_mean(loss)


def sum_of_samples(loss: tf.Tensor) -> tf.Tensor:
    """Scales a sum over this rank's samples so that the mean over ranks is the sum over all."""
    if current().has_whole_batch:
        return _as_mean(loss)
    count, share = replicas_of(tf.distribute.get_strategy()), own_share()
    factor = tf.constant(float(count), tf.float64)
    if share is not None and not share.is_equal:
        factor *= tf.math.reciprocal_no_nan(share.ratio)
    return _as_mean(loss * tf.cast(factor, loss.dtype))


def check_values(values: tf.Tensor) -> None:
    """Warns of values of samples that Keras adds up, and that depend on other samples."""
    if current().mask is not None:
        return  # Keras has multiplied it by a quotient of its sums.
    extent = _extent(values)
    if extent.is_weighted or extent.is_paired:
        _warn_unless_mean(values, extent)


def whole_value(values: tf.Tensor, metric: Any) -> tf.Tensor:
    """Scales the argument of a mean metric, if it is a sum over this rank's samples.

    Warns on rank 0 of values that parts of a batch do not give.

    Args:
        values: A scalar, or a value for each sample.
        metric: The metric.
    """
    if not is_in_graph(values):
        return values
    extent = _extent(values)
    if values.shape.rank != 0:
        _warn_of_metric(metric, problem_of(values, extent) if extent.is_paired else None)
        return values
    if not values.dtype.is_floating:
        return values
    if extent.is_sum and not extent.is_weighted:
        return sum_of_samples(values)
    _warn_of_metric(metric, problem_of(values, extent))
    return values


def _warn_of_metric(metric: Any, problem: str | None) -> None:
    """Warns on rank 0 of a metric whose values of parts of a batch do not give that of the whole.

    A metric that shows a loss is not named if the loss has been.
    """
    if problem is None or problem in _warned or _strategy.communicator.rank > 0:
        return
    _warn_once(
        f"metric {metric.name}",
        "a value of the metric %r %s; its log is the mean of the ranks' values, which may not be "
        "that of one process (GRADRING_WITH_STRATEGY). Add up its parts in a keras.metrics.Metric",
        metric.name,
        problem,
    )


def is_sum(loss: Any) -> bool:
    """Returns whether a scalar loss of the program's own is a sum over samples."""
    return _is_sum([loss])


def is_sum_of_samples(loss: Any, total: tf.Tensor) -> bool:
    """Returns whether a value passed to `add_loss` is, or becomes, a sum over samples.

    Args:
        loss: The value; Keras adds up all of its elements.
        total: That sum.
    """
    if tf.is_symbolic_tensor(total):
        extent = _extent(total)
        if is_given(tf.distribute.get_strategy()):
            _warn_unless_mean(total, extent)
        return extent.is_sum
    return _has_rows(tf.convert_to_tensor(loss))


def whole_logs(logs: Any) -> Any:
    """Extends a step's logs to all samples: gathers values per sample, and adds up sums."""

    def whole(log: Any) -> Any:
        if not isinstance(log, tf.Tensor):
            return log
        if _has_rows(log):
            if current().has_whole_batch:
                return log
            return tf.distribute.get_replica_context().all_gather(log, axis=0)
        extent = _extent(log)
        if not extent.is_sum or extent.is_weighted:
            return log
        if log.dtype.is_integer and not current().has_whole_batch:
            # Collectives do not take all types of integers.
            total = tf.distribute.get_replica_context().all_reduce(_SUM, tf.cast(log, tf.int64))
            return tf.cast(total, log.dtype)
        return sum_of_samples(log) if log.dtype.is_floating else log

    return tf.nest.map_structure(whole, logs)


def _has_rows(value: tf.Tensor) -> bool:
    """Returns whether a tensor has one row for each sample."""
    if tf.is_symbolic_tensor(value):
        return bool(value.shape.rank) and _extent(value).has_rows
    return bool(value.shape.rank) and value.shape[0] in _sizes_of_batch()


def _sizes_of_batch() -> set[int]:
    return {each.shape[0] for each in current().batch if each.shape.rank}


def _as_mean(loss: tf.Tensor) -> tf.Tensor:
    current().means.append(loss)
    return loss


def _is_sum(targets: Sequence[Any]) -> bool:
    extents = [_extent(target) for target in targets]
    for target, extent in zip(targets, extents, strict=True):
        _warn_unless_mean(target, extent)
    if not (current().means or all(map(is_in_graph, targets))):
        _warn_of_eager_loss()
    if current().has_whole_batch:
        return False  # every rank has the same sum, so the mean over ranks is that sum
    return bool(extents) and all(extent.is_sum for extent in extents)


def _extent(tensor: Any) -> Extent:
    step = current()
    return extent_of(tensor, step.batch, step.means, step.filled)


def _warn_unless_mean(loss: Any, extent: Extent) -> None:
    """Warns on rank 0 of a loss that is neither a mean nor a sum over samples.

    The ranks' parts of such a loss do not add up to the loss of one process.
    """
    what = problem_of(loss, extent)
    if what is not None and _strategy.communicator.rank == 0:
        _warn_once(
            what,
            "a loss %s; it is taken for a mean, so its gradients may differ from those of one "
            "process (GRADRING_WITH_STRATEGY). `gradring verify` shows how much",
            what,
        )


def _warn_of_eager_loss() -> None:
    """Warns on rank 0 of a loss without a graph in a step in which Keras has computed none."""
    if _strategy.communicator.rank == 0 and _strategy.communicator.world_size > 1:
        _warn_once(
            "eager loss",
            "an eager step does not show whether a loss is a mean or a sum over samples; it is "
            "taken for a mean, so a sum is divided by %d ranks (GRADRING_WITH_STRATEGY); leave out "
            "run_eagerly=True",
            _strategy.communicator.world_size,
        )


def _warn_once(key: str, text: str, *args: Any) -> None:
    if key not in _warned:
        _warned.add(key)
        _log.warning(text, *args)


# Metrics


def logs_of_epoch(original: Callable[..., Any], model: Any, logs: Any) -> Any:
    """Reads metrics that have counted the samples of all ranks.

    A `train_step` of the program may return metrics that Keras does not read here, such as
    "compile_metrics"; their logs are replaced as well.
    """
    with whole_metrics(model):
        found = original(model, logs)
        if isinstance(found, dict):
            of_metrics = _names_of_metrics.get(model, ())
            whole = {m.name: m.result() for m in model.metrics if m.name in of_metrics}
            found = {**found, **{name: log for name, log in whole.items() if name in found}}
        # A metric may return its variable, which holds this rank's value again after the block.
        return tf.nest.map_structure(
            lambda log: tf.convert_to_tensor(log) if hasattr(log, "assign") else log, found
        )


#: For each model, names of the logs that its step reads from metrics.
_names_of_metrics: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()


def note_metrics(model: Any, logs: Any) -> None:
    """Notes which of a step's logs are results of the model's metrics."""
    if not isinstance(logs, dict):
        return
    for metric in model.metrics:
        own = [getattr(variable, "value", variable) for variable in metric.variables]
        handles = [variable.handle for variable in own if hasattr(variable, "handle")]
        leaves = tf.nest.flatten(logs.get(metric.name))
        if any(reads(leaf, handles) for leaf in leaves):
            _names_of_metrics.setdefault(model, set()).add(metric.name)


def logs_of_batch(model: Any, batches: Any, logs: Any) -> Any:
    """Returns the logs of `train_on_batch` and `test_on_batch`.

    Metrics other than means are read again over all ranks: a mean of the ranks' results is wrong.
    """
    if are_of_loop(batches) or not _has_other_metrics(model):
        return logs
    return keras_names.LOGS_OF_EPOCH.of(model)(logs)


@contextlib.contextmanager
def whole_metrics(model: Any) -> Iterator[None]:
    """Gives a model's metric variables, inside the block, their sums over all ranks."""
    communicator = model.distribute_strategy.communicator
    variables = list(model.metrics_variables)
    own = [np.array(tf.convert_to_tensor(each)) for each in variables]
    if communicator.world_size == 1 or not own:
        yield
        return
    sums = [each.copy() for each in own]
    for dtype in sorted({each.dtype.name for each in sums}):
        bucket = [each for each in sums if each.dtype.name == dtype]
        communicator.all_reduce(bucket, "sum", name=f"metrics of {dtype}")
    for variable, value in zip(variables, sums, strict=True):
        variable.assign(value)
    try:
        yield
    finally:
        for variable, value in zip(variables, own, strict=True):
            variable.assign(value)


def _has_other_metrics(model: Any) -> bool:
    """Returns whether a model has a metric whose result is no mean, such as the root of one."""
    keras: Any = sys.modules["keras"]
    metrics = [inner for each in model.metrics for inner in getattr(each, "metrics", [each])]
    mean = keras.metrics.Mean.result
    return not all(getattr(type(each), "result", None) is mean for each in metrics)
