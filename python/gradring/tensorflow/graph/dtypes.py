"""Element types that the engine takes, and how the others are carried in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import tensorflow as tf

from gradring.gradients.reduction import Collective
from gradring.group import arrays

#: Element types that the engine reduces.
NATIVE_DTYPES = (
    tf.float32,
    tf.float64,
    tf.float16,
    tf.bfloat16,
    tf.int32,
    tf.int64,
    tf.uint8,
)

#: Element types that are reduced in a wider one; the result is cast back.
WIDENED_DTYPES = {
    tf.int8: tf.int32,
    tf.int16: tf.int32,
    tf.uint16: tf.int32,
    tf.uint32: tf.int64,
}

#: Element types in which the others are added up: as wide as the engine's, or wider.
_ACCUMULATORS = {
    tf.float16: tf.float32,
    tf.bfloat16: tf.float32,
    **dict.fromkeys((tf.uint8, tf.int32, *WIDENED_DTYPES), tf.int64),
}


def accumulator(dtype: tf.DType) -> tf.DType:
    """The element type in which to add values of `dtype` for the bits that the engine returns."""
    return _ACCUMULATORS.get(dtype, dtype)


def map_values(function: Callable[[tf.Tensor], tf.Tensor], gradient: Any) -> Any:
    """What the function makes of a tensor, or of the values of `tf.IndexedSlices`; None of None."""
    if isinstance(gradient, tf.IndexedSlices):
        values = function(gradient.values)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return None if gradient is None else function(gradient)


def as_tensor(value: Any, label: str) -> tf.Tensor:
    """A tensor with the contents of `value`.

    Raises:
        TypeError: There is no such tensor.
    """
    if isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
        raise TypeError(
            f"{label}: a {type(value).__name__} cannot be sent, since ranks can differ in its "
            "shape; make it dense by to_tensor() or tf.sparse.to_dense, or send its parts"
        )
    if not isinstance(value, (tf.Tensor, tf.Variable)):
        try:
            arrays.check_plain(value)
        except TypeError as error:
            raise TypeError(f"{label}: {error}") from error
    try:
        return tf.convert_to_tensor(value)
    except (AttributeError, TypeError, ValueError) as error:
        raise TypeError(
            f"{label}: a {type(value).__name__} is no tensor ({error}); pass tensors, variables, "
            "numpy arrays or numbers"
        ) from error


def as_native(tensor: tf.Tensor, label: str) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    """The tensor in one of `NATIVE_DTYPES`, of the same shape, and the way back.

    Raises:
        TypeError: Its dtype cannot be reduced.
    """
    dtype = tensor.dtype
    if dtype in NATIVE_DTYPES:
        return tensor, lambda result: result
    if dtype in WIDENED_DTYPES:
        return tf.cast(tensor, WIDENED_DTYPES[dtype]), lambda result: tf.cast(result, dtype)
    known = ", ".join(t.name for t in (*NATIVE_DTYPES, *WIDENED_DTYPES))
    raise TypeError(f"{label}: {dtype.name} cannot be reduced; cast it to one of {known}")


def with_dtype(collective: Collective, tensor: tf.Tensor) -> Collective:
    """The collective by a name that has the tensor's dtype, if it travels as another one.

    Ranks compare names: otherwise nobody would see that one rank has bool and another int8.
    """
    if tensor.dtype in NATIVE_DTYPES:
        return collective
    return replace(collective, label=collective.label.of_dtype(tensor.dtype.name))


def as_native_bits(
    tensor: tf.Tensor, label: str
) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    """The tensor's bits in one of `NATIVE_DTYPES`, and the way back; parts are one dimension more.

    Raises:
        TypeError: Its dtype has no fixed width.
    """
    dtype = tensor.dtype
    if dtype in NATIVE_DTYPES:
        return tensor, lambda result: result
    if dtype == tf.bool:
        return tf.cast(tensor, tf.uint8), lambda result: tf.cast(result, tf.bool)
    if dtype.is_complex:
        # Through these ops TensorFlow leads gradients, which it does not through a bitcast.
        parts = tf.stack([tf.math.real(tensor), tf.math.imag(tensor)], -1)
        return parts, lambda result: tf.complex(result[..., 0], result[..., 1])
    if dtype in (tf.string, tf.variant, tf.resource):
        raise TypeError(f"{label}: {dtype.name} has no fixed width and cannot be sent")
    try:
        bits = tf.bitcast(tensor, tf.uint8)
    except (tf.errors.InvalidArgumentError, TypeError, ValueError) as error:
        raise TypeError(f"{label}: {dtype.name} cannot be sent; cast it to another type") from error
    return bits, lambda result: tf.bitcast(result, dtype)
