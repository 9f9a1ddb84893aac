"""Batches without samples: a replica gets one when there are fewer samples than replicas.

Many of TensorFlow's kernels cannot compute no rows: they fail, abort the process, or return NaN or
memory that nobody has written. So the outermost layer of Keras that gets such a batch computes one
row in its place, and so does a loss. Nobody else sees that row: it is cut off the outputs, its
gradient is zero, and neither batch normalisation nor `add_loss` counts it.

The row consists of halves and ones, because those are no mask, no index of padding, and have a
finite logarithm, reciprocal and square root. It costs nothing where the number of rows is known,
and no copy where it is not.

A layer that is a `tf.function`, or has one as a method, passes its batch on to the layers in it.
What is traced once may be called from many graphs, and could not be told which batch is empty.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from gradring.tensorflow.graph import compat
from gradring.tensorflow.graph.adoption import communicator_of, replicas_of
from gradring.tensorflow.graph.fallback import falls_back
from gradring.tensorflow.graph.replica_step import current, holding
from gradring.tensorflow.seams import keras_names

_optional = functools.partial(
    falls_back,
    "the row that stands in for a batch without samples",
    "layers and losses get what comes",
)

#: Of dimensions that are unknown as well: enough for most windows, and not for many positions.
_UNKNOWN_SIZE = 32

_SPARSE_OR_RAGGED = (tf.sparse.SparseTensor, tf.RaggedTensor)

_COUNTS = (
    "this rank has a batch without samples, and a row that stands in for it would count: make the "
    "batches of all ranks larger, or drop the last one (drop_remainder=True)"
)

#: The mask of a sequence, and from what an activation has made probabilities.
_KEPT_ON_TENSORS = (keras_names.MASK.name, keras_names.LOGITS.name)


class _Outside:
    """Whether batches may be empty where there is no strategy."""

    is_expected = False


def expect_outside() -> None:
    """From now on, layers that no strategy runs may get empty batches, as by `join`."""
    _Outside.is_expected = True


def may_come(_: Any = None) -> bool:
    """Whether the code that runs may get an empty batch."""
    context = tf.distribute.get_replica_context()
    if context is None:
        return False
    if communicator_of(context.strategy) is not None:
        return may_come_in(context.strategy)
    return may_come_outside()


def may_come_in(strategy: Any) -> bool:
    """Whether a replica of a strategy of ours may get an empty batch.

    A worker of parameter servers evaluates as the only replica, also its part of a batch in `fit`.
    """
    return bool(replicas_of(strategy) > 1 or strategy.extended.servers > 0)


def may_come_outside(_: Any = None) -> bool:
    """The same, of code outside of any strategy."""
    return _Outside.is_expected and not tf.distribute.has_strategy()


def is_empty(inputs: tf.Tensor) -> bool | tf.Tensor:
    """Whether what a layer gets stands for a batch without samples.

    Args:
        inputs: What the layer gets; its first dimension is that of the samples.

    Returns:
        A bool where that is known, or else a boolean scalar.
    """
    with _optional():
        told = _told()
        if told is not None:
            return told
        count = inputs.shape.num_elements()
        return tf.equal(tf.size(inputs), 0) if count is None else count == 0
    return False


def call(original: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for the `__call__` of layers and of losses."""
    if current().is_empty is not None:
        return original(layer, *args, **kwargs)
    given = _given(layer, (args, kwargs))
    if given is None:
        return original(layer, *args, **kwargs)
    told, (args, kwargs) = given
    with holding(is_empty=told):
        outputs = original(layer, *args, **kwargs)
        if told is False:
            return outputs
        return _changed(told, lambda: _map(functools.partial(_without_row, told), outputs), outputs)


def add_loss(original: Callable[..., Any], layer: Any, loss: Any) -> Any:
    """Stands in for the `add_loss` of layers: what has no samples adds nothing."""
    told = _told()
    if told is not None:
        loss = _changed(told, lambda: tf.nest.map_structure(_zero_if(told), loss), loss)
    return original(layer, loss)


def all_reduce(
    original: Callable[..., Any], context: Any, reduce_op: Any, value: Any, options: Any = None
) -> Any:
    """Stands in for that of replicas: a row that is in no batch adds nothing to a sum."""
    told = _told()
    if told is not None and getattr(reduce_op, "name", str(reduce_op)).upper() == "SUM":
        zero = _zero_if(told)
        value = _changed(
            told,
            lambda: tf.nest.map_structure(
                lambda v: zero(v) if isinstance(v, tf.Tensor) else v, value
            ),
            value,
        )
    return original(context, reduce_op, value, options)


def keep_statistics(
    original: Callable[..., Any], layer: Any, inputs: Any, *args: Any, **kwargs: Any
) -> Any:
    """Stands in for the `call` of `BatchNormalization` outside of strategies."""
    variables = layer.non_trainable_variables
    return unless(is_empty(inputs), variables, lambda: original(layer, inputs, *args, **kwargs))


def unless(told: bool | tf.Tensor, variables: Sequence[Any], call: Callable[[], Any]) -> Any:
    """What `call` returns; the variables stay what they are if `told` is true."""
    before = [] if told is False else [(v, tf.convert_to_tensor(v)) for v in variables]
    outputs = call()
    for variable, old in before:
        variable.assign(tf.where(told, old, tf.convert_to_tensor(variable)))
    return outputs


def with_row(batch: Any) -> Any:
    """The same nest, in which all that has no rows has one."""
    return _map(functools.partial(_with_row, tf.constant(True)), batch)


def rows_of(value: Any) -> int | tf.Tensor | None:
    """The size of the first dimension, as an int or an int64 scalar; None if there is none."""
    if isinstance(value, np.ndarray):
        return len(value) if value.ndim else None
    if not isinstance(value, (tf.Tensor, *_SPARSE_OR_RAGGED)) or not value.shape.rank:
        return None
    if value.shape[0] is not None:
        return int(value.shape[0])
    if isinstance(value, tf.RaggedTensor):
        return tf.cast(value.nrows(), tf.int64)
    if isinstance(value, tf.sparse.SparseTensor):
        return value.dense_shape[0]
    return tf.shape(value, tf.int64)[0]


def first_rows_of(nest: Any) -> int | tf.Tensor | None:
    """`rows_of` the first tensor that has any."""
    found = (rows_of(leaf) for leaf in tf.nest.flatten(nest))
    return next((rows for rows in found if rows is not None), None)


@_optional()
def _given(layer: Any, nest: Any) -> tuple[bool | tf.Tensor, Any] | None:
    """Whether what a layer gets is empty, and the same with a row then; None for the plain way."""
    told = _have_no_rows(nest)
    if told is False:
        return told, nest
    if _has_functions(layer):
        return None
    return told, _map(functools.partial(_with_row, told), nest)


def _changed(told: bool | tf.Tensor, change: Callable[[], Any], value: Any) -> Any:
    """What `change` makes of a value so that the row does not count.

    Where that cannot be, it is the value itself, and a step with an empty batch fails.
    """
    with _optional():
        return change()
    tf.debugging.assert_equal(told, False, _COUNTS)
    return value


def _told() -> tf.Tensor | None:
    """Whether the outermost layer got an empty batch, where it may have."""
    told = current().is_empty
    return None if told is None or told is False or not compat.can_take(told) else told


def _have_no_rows(nest: Any) -> bool | tf.Tensor:
    rows = first_rows_of(nest)
    if rows is None or (isinstance(rows, int) and rows > 0):
        return False
    return tf.equal(rows, 0)


def _has_functions(layer: Any) -> bool:
    return any(
        isinstance(member, compat.Function)
        for each in keras_names.FLATTEN_LAYERS.of(layer, lambda: [layer])()  # a loss is one
        for members in (each, *type(each).__mro__)
        for member in vars(members).values()
    )


def _map(function: Callable[[Any], Any], nest: Any) -> Any:
    """`tf.nest.map_structure`, of what Keras keeps on tensors as well."""

    def mapped(leaf: Any) -> Any:
        result = function(leaf)
        if result is not leaf and isinstance(result, tf.Tensor) and result.shape.rank:
            # For who asks the graph what depends on the samples.
            current().batch.append(result)
        for name in _KEPT_ON_TENSORS if result is not leaf else ():
            kept = getattr(leaf, name, None)
            if kept is not None:
                setattr(result, name, function(kept))
        return result

    return tf.nest.map_structure(mapped, nest)


def _with_row(told: tf.Tensor, leaf: Any) -> Any:
    """The same with a row where it has none, if `told` is true."""
    rows = rows_of(leaf)
    if rows is None or (isinstance(rows, int) and rows > 0):
        return leaf
    if isinstance(leaf, np.ndarray):
        leaf = tf.convert_to_tensor(leaf)
    return _filled(leaf, tf.logical_and(told, tf.equal(rows, 0)))


def _filled(rows: Any, told: tf.Tensor) -> Any:
    if isinstance(rows, tf.sparse.SparseTensor):
        size = tf.maximum(rows.dense_shape[0], tf.cast(told, tf.int64))
        return tf.sparse.SparseTensor(rows.indices, rows.values, _with_size(size, rows))
    if isinstance(rows, tf.RaggedTensor):
        one = tf.constant([0, 1], rows.row_splits.dtype)
        splits = tf.cond(told, lambda: one, lambda: rows.row_splits)
        return tf.RaggedTensor.from_row_splits(_filled(rows.values, told), splits, validate=False)
    if not rows.dtype.is_floating:
        return _pad(rows, told, {tf.string: "1", tf.bool: True}.get(rows.dtype, 1))

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def fill(rows: tf.Tensor) -> Any:
        return _pad(rows, told, 0.5), lambda gradient: _cut(gradient, told)

    return fill(rows)


def _without_row(told: tf.Tensor, output: Any) -> Any:
    """The same without the row, if `told` is true; what has no rows is zero then."""
    if isinstance(output, _SPARSE_OR_RAGGED):
        return _cut(output, told)
    if not isinstance(output, tf.Tensor) or output.shape.rank is None:
        return output
    rows = output.shape[0] if output.shape.rank else 0
    if rows is not None and not (tf.executing_eagerly() and rows == 1):
        return _zero_if(told)(output)
    if not output.dtype.is_floating:
        return _cut(output, told)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def drop(rows: tf.Tensor) -> Any:
        return _cut(rows, told), lambda gradient: _pad(gradient, told, 0)

    return drop(output)


def _pad(rows: tf.Tensor, told: tf.Tensor, value: Any) -> tf.Tensor:
    def row() -> tf.Tensor:
        sizes = tf.shape(rows)[1:]
        sizes = tf.where(tf.equal(sizes, 0), _UNKNOWN_SIZE, sizes)
        return tf.fill(tf.concat([[1], sizes], 0), tf.cast(value, rows.dtype))

    padded = tf.cond(told, row, lambda: tf.identity(rows))
    return tf.ensure_shape(padded, [None, *(size or None for size in rows.shape[1:])])


def _cut(rows: Any, told: tf.Tensor) -> Any:
    if isinstance(rows, tf.sparse.SparseTensor):
        size = rows.dense_shape[0] * tf.cast(tf.logical_not(told), tf.int64)
        shape = _with_size(size, rows)
        return tf.sparse.slice(rows, tf.zeros_like(shape), shape)
    count = rows.nrows() if isinstance(rows, tf.RaggedTensor) else tf.shape(rows)[0]
    return rows[: tf.where(told, tf.zeros_like(count), count)]


def _with_size(size: tf.Tensor, rows: tf.sparse.SparseTensor) -> tf.Tensor:
    """The shape of sparse rows with another number of them; what is known of it stays known."""
    known = enumerate(rows.shape[1:], 1)
    rest = [rows.dense_shape[axis] if length is None else length for axis, length in known]
    return tf.stack([size, *(tf.cast(length, tf.int64) for length in rest)])


def _zero_if(told: Any) -> Callable[[Any], Any]:
    def zero(value: Any) -> Any:
        result = tf.where(told, tf.zeros_like(value), value)
        if hasattr(value, "_gradring_is_scaled"):
            result._gradring_is_scaled = value._gradring_is_scaled
        return result

    return zero
