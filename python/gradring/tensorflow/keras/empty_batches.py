"""Batches without samples: a replica gets one when there are fewer samples than replicas.

Many of TensorFlow's kernels cannot handle zero rows: they fail, abort the process, or return NaN or
uninitialised memory. So the outermost Keras layer that gets an empty batch computes one stand-in
row instead, and so does a loss. The row is invisible elsewhere: it is cut off the outputs, its
gradient is zero, and neither batch normalisation nor `add_loss` counts it.

The row consists of halves and ones. These values are no mask and no padding index, and their
logarithm, reciprocal and square root are finite. The row costs nothing if the number of rows is
static, and no copy if it is dynamic.

A layer that is a `tf.function`, or has one as a method, gets no row and passes the empty batch to
its inner layers. Many graphs may call one traced function, so a tensor of one graph cannot tell
the function's layers whether the batch is empty.
"""

from __future__ import annotations

import functools
import sys
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

#: Size of the row's unknown dimensions: large enough for most convolution and pooling windows,
#: small enough for most tables of positions.
_UNKNOWN_SIZE = 32

_SPARSE_OR_RAGGED = (tf.sparse.SparseTensor, tf.RaggedTensor)

_COUNTS = (
    "this rank has a batch without samples, and a row that stands in for it would count: make the "
    "batches of all ranks larger, or drop the last one (drop_remainder=True)"
)

#: Attributes that Keras keeps on tensors: a sequence's mask, and the logits of probabilities.
_KEPT_ON_TENSORS = (keras_names.MASK.name, keras_names.LOGITS.name)


class _Outside:
    """State of code outside of any strategy: `is_expected` is True if batches may be empty."""

    is_expected = False


def expect_outside() -> None:
    """Prepares layers outside of any strategy for empty batches, as `join` makes them."""
    _Outside.is_expected = True


def may_come(_: Any = None) -> bool:
    """Returns whether the running code may get an empty batch."""
    context = tf.distribute.get_replica_context()
    if context is None:
        return False
    if communicator_of(context.strategy) is not None:
        return may_come_in(context.strategy)
    return may_come_outside()


def may_come_in(strategy: Any) -> bool:
    """Returns whether a replica of a strategy of ours may get an empty batch.

    A worker of parameter servers is the only replica, but `fit` still gives it part of a batch.
    """
    return bool(replicas_of(strategy) > 1 or strategy.extended.servers > 0)


def may_come_outside(_: Any = None) -> bool:
    """Returns whether code outside of any strategy may get an empty batch."""
    return _Outside.is_expected and not tf.distribute.has_strategy()


def is_empty(inputs: tf.Tensor) -> bool | tf.Tensor:
    """Returns whether a layer's inputs stand for a batch without samples.

    Args:
        inputs: Input tensor of the layer; the first dimension counts samples.

    Returns:
        A bool if the answer is static, else a boolean scalar tensor.
    """
    with _optional():
        empty = _emptiness()
        if empty is not None:
            return empty
        count = inputs.shape.num_elements()
        return tf.equal(tf.size(inputs), 0) if count is None else count == 0
    return False


def call(original: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for the `__call__` of layers and losses; adds a row to an empty batch."""
    outputs = _with_samples(original, layer, *args, **kwargs)
    if args and current().is_in_run and not tf.executing_eagerly():
        _note_rows(layer, args[0], outputs)
    return outputs


def _note_rows(layer: Any, inputs: Any, outputs: Any) -> None:
    """Notes that outputs have the rows of a layer's inputs, if a loop hides it from `extent_of`."""
    layers = sys.modules["keras"].layers
    if isinstance(layer, (layers.RNN, layers.TimeDistributed)):
        tensors = [each for each in tf.nest.flatten(outputs) if isinstance(each, tf.Tensor)]
        current().filled.extend((each, inputs) for each in tensors if each.shape.rank)


def _with_samples(original: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
    if current().is_empty is not None:
        return original(layer, *args, **kwargs)
    given = _given(layer, (args, kwargs))
    if given is None:
        return original(layer, *args, **kwargs)
    empty, (args, kwargs) = given
    with holding(is_empty=empty):
        outputs = original(layer, *args, **kwargs)
        if empty is False:
            return outputs
        return _changed(
            empty, lambda: _map(functools.partial(_without_row, empty), outputs), outputs
        )


def add_loss(original: Callable[..., Any], layer: Any, loss: Any) -> Any:
    """Stands in for the `add_loss` of layers; the loss of an empty batch counts as zero."""
    empty = _emptiness()
    if empty is not None:
        loss = _changed(empty, lambda: tf.nest.map_structure(_zero_if(empty), loss), loss)
    return original(layer, loss)


def all_reduce(
    original: Callable[..., Any], context: Any, reduce_op: Any, value: Any, options: Any = None
) -> Any:
    """Stands in for `ReplicaContext.all_reduce`; the stand-in row adds nothing to a sum."""
    empty = _emptiness()
    if empty is not None and getattr(reduce_op, "name", str(reduce_op)).upper() == "SUM":
        zero = _zero_if(empty)
        value = _changed(
            empty,
            lambda: tf.nest.map_structure(
                lambda v: zero(v) if isinstance(v, tf.Tensor) else v, value
            ),
            value,
        )
    return original(context, reduce_op, value, options)


def keep_statistics(
    original: Callable[..., Any], layer: Any, inputs: Any, *args: Any, **kwargs: Any
) -> Any:
    """Stands in for `BatchNormalization.call` outside of strategies; skips empty batches."""
    variables = layer.non_trainable_variables
    return unless(is_empty(inputs), variables, lambda: original(layer, inputs, *args, **kwargs))


def unless(empty: bool | tf.Tensor, variables: Sequence[Any], call: Callable[[], Any]) -> Any:
    """Returns the result of `call`; restores the variables afterwards if `empty` is true."""
    before = [] if empty is False else [(v, tf.convert_to_tensor(v)) for v in variables]
    outputs = call()
    for variable, old in before:
        variable.assign(tf.where(empty, old, tf.convert_to_tensor(variable)))
    return outputs


def with_row(batch: Any) -> Any:
    """Returns the nest with one stand-in row in each tensor that has no rows."""
    return _map(functools.partial(_with_row, tf.constant(True)), batch)


def rows_of(value: Any) -> int | tf.Tensor | None:
    """Returns the size of the first dimension, as an int or int64 scalar; None for scalars."""
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
    """Returns `rows_of` the first leaf for which it is not None."""
    found = (rows_of(leaf) for leaf in tf.nest.flatten(nest))
    return next((rows for rows in found if rows is not None), None)


@_optional()
def _given(layer: Any, nest: Any) -> tuple[bool | tf.Tensor, Any] | None:
    """Returns whether a layer's inputs are empty, and the inputs with a row if they are.

    Returns None if the layer must get its inputs unchanged, because it has a `tf.function`.
    """
    empty = _have_no_rows(nest)
    if empty is False:
        return empty, nest
    if _has_functions(layer):
        return None
    return empty, _map(functools.partial(_with_row, empty), nest)


def _changed(empty: bool | tf.Tensor, change: Callable[[], Any], value: Any) -> Any:
    """Returns the result of `change`, which removes the row's effect from `value`.

    If `change` fails, returns `value`, and a step with an empty batch raises an error.
    """
    with _optional():
        return change()
    tf.debugging.assert_equal(empty, False, _COUNTS)
    return value


def _emptiness() -> tf.Tensor | None:
    """Returns the tensor that tells whether the outermost layer's batch is empty.

    Returns None outside of layers, for batches with samples, and in graphs that cannot take it.
    """
    empty = current().is_empty
    return None if empty is None or empty is False or not compat.can_take(empty) else empty


def _have_no_rows(nest: Any) -> bool | tf.Tensor:
    rows = first_rows_of(nest)
    if rows is None or (isinstance(rows, int) and rows > 0):
        return False
    return tf.equal(rows, 0)


def _has_functions(layer: Any) -> bool:
    return any(
        isinstance(member, compat.Function)
        for each in keras_names.FLATTEN_LAYERS.of(layer, lambda: [layer])()  # losses lack the name
        for members in (each, *type(each).__mro__)
        for member in vars(members).values()
    )


def _map(function: Callable[[Any], Any], nest: Any) -> Any:
    """Maps the leaves of a nest, and the attributes that Keras keeps on tensors."""

    def mapped(leaf: Any) -> Any:
        result = function(leaf)
        if result is not leaf and isinstance(result, tf.Tensor) and result.shape.rank:
            # `graph.extent` looks up the tensors that have a row for each sample.
            current().batch.append(result)
            current().filled.append((result, leaf))
        for name in _KEPT_ON_TENSORS if result is not leaf else ():
            kept = getattr(leaf, name, None)
            if kept is not None:
                setattr(result, name, function(kept))
        return result

    return tf.nest.map_structure(mapped, nest)


def _with_row(empty: tf.Tensor, leaf: Any) -> Any:
    """Returns the leaf, with one stand-in row if it has no rows and `empty` is true."""
    rows = rows_of(leaf)
    if rows is None or (isinstance(rows, int) and rows > 0):
        return leaf
    if isinstance(leaf, np.ndarray):
        leaf = tf.convert_to_tensor(leaf)
    return _filled(leaf, tf.logical_and(empty, tf.equal(rows, 0)))


def _filled(rows: Any, empty: tf.Tensor) -> Any:
    if isinstance(rows, tf.sparse.SparseTensor):
        size = tf.maximum(rows.dense_shape[0], tf.cast(empty, tf.int64))
        return tf.sparse.SparseTensor(rows.indices, rows.values, _with_size(size, rows))
    if isinstance(rows, tf.RaggedTensor):
        one = tf.constant([0, 1], rows.row_splits.dtype)
        splits = tf.cond(empty, lambda: one, lambda: rows.row_splits)
        return tf.RaggedTensor.from_row_splits(_filled(rows.values, empty), splits, validate=False)
    if not rows.dtype.is_floating:
        return _pad(rows, empty, {tf.string: "1", tf.bool: True}.get(rows.dtype, 1))

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def fill(rows: tf.Tensor) -> Any:
        return _pad(rows, empty, 0.5), lambda gradient: _cut(tf.convert_to_tensor(gradient), empty)

    return fill(rows)


def _without_row(empty: tf.Tensor, output: Any) -> Any:
    """Removes the stand-in row from an output if `empty` is true.

    An output without a dimension of samples becomes zero instead.
    """
    if isinstance(output, _SPARSE_OR_RAGGED):
        return _cut(output, empty)
    if not isinstance(output, tf.Tensor) or output.shape.rank is None:
        return output
    rows = output.shape[0] if output.shape.rank else 0
    if rows is not None and not (tf.executing_eagerly() and rows == 1):
        return _zero_if(empty)(output)
    if not output.dtype.is_floating:
        return _cut(output, empty)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def drop(rows: tf.Tensor) -> Any:
        # The gradient of a gathering of rows is an `IndexedSlices`.
        return _cut(rows, empty), lambda gradient: _pad(tf.convert_to_tensor(gradient), empty, 0)

    return drop(output)


def _pad(rows: tf.Tensor, empty: tf.Tensor, value: Any) -> tf.Tensor:
    def row() -> tf.Tensor:
        sizes = tf.shape(rows)[1:]
        sizes = tf.where(tf.equal(sizes, 0), _UNKNOWN_SIZE, sizes)
        return tf.fill(tf.concat([[1], sizes], 0), tf.cast(value, rows.dtype))

    padded = tf.cond(empty, row, lambda: tf.identity(rows))
    if rows.shape.rank is None:
        return padded
    return tf.ensure_shape(padded, [None, *(size or None for size in rows.shape[1:])])


def _cut(rows: Any, empty: tf.Tensor) -> Any:
    if isinstance(rows, tf.sparse.SparseTensor):
        size = rows.dense_shape[0] * tf.cast(tf.logical_not(empty), tf.int64)
        shape = _with_size(size, rows)
        return tf.sparse.slice(rows, tf.zeros_like(shape), shape)
    count = rows.nrows() if isinstance(rows, tf.RaggedTensor) else tf.shape(rows)[0]
    return rows[: tf.where(empty, tf.zeros_like(count), count)]


def _with_size(size: tf.Tensor, rows: tf.sparse.SparseTensor) -> tf.Tensor:
    """Returns the dense shape with `size` rows; keeps the static sizes of other dimensions."""
    known = enumerate(rows.shape[1:], 1)
    rest = [rows.dense_shape[axis] if length is None else length for axis, length in known]
    return tf.stack([size, *(tf.cast(length, tf.int64) for length in rest)])


def _zero_if(empty: Any) -> Callable[[Any], Any]:
    def zero(value: Any) -> Any:
        result = tf.where(empty, tf.zeros_like(value), value)
        if hasattr(value, "_gradring_is_scaled"):
            result._gradring_is_scaled = value._gradring_is_scaled
        return result

    return zero
