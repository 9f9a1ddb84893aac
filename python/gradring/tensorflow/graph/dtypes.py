"""Element types that the engine reduces, and the encoding of all others in these."""

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

#: Element types that are cast to a wider type for the reduction; the result is cast back.
WIDENED_DTYPES = {
    tf.int8: tf.int32,
    tf.int16: tf.int32,
    tf.uint16: tf.int32,
    tf.uint32: tf.int64,
}

#: Types in which TensorFlow adds up values of narrow types: as wide as the engine's accumulators
#: or wider.
_ACCUMULATORS = {
    tf.float16: tf.float32,
    tf.bfloat16: tf.float32,
    **dict.fromkeys((tf.uint8, tf.int32, *WIDENED_DTYPES), tf.int64),
}


def accumulator(dtype: tf.DType) -> tf.DType:
    """Returns the type in which to add values of `dtype`, to get the same bits as the engine."""
    return _ACCUMULATORS.get(dtype, dtype)


def map_values(function: Callable[[tf.Tensor], tf.Tensor], gradient: Any) -> Any:
    """Applies the function to a tensor, or to the values of `tf.IndexedSlices`; None stays None."""
    if isinstance(gradient, tf.IndexedSlices):
        values = function(gradient.values)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return None if gradient is None else function(gradient)


def as_tensor(value: Any, label: str) -> tf.Tensor:
    """Converts a value to a tensor.

    Raises:
        TypeError: The value cannot be converted, or is ragged or sparse.
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
    """Casts a tensor to one of `NATIVE_DTYPES`.

    Returns:
        The tensor, of the same shape, and a function that casts the result back.

    Raises:
        TypeError: The dtype cannot be reduced.
    """
    dtype = tensor.dtype
    if dtype in NATIVE_DTYPES:
        return tensor, lambda result: result
    if dtype in WIDENED_DTYPES:
        return tf.cast(tensor, WIDENED_DTYPES[dtype]), lambda result: tf.cast(result, dtype)
    known = ", ".join(t.name for t in (*NATIVE_DTYPES, *WIDENED_DTYPES))
    raise TypeError(f"{label}: {dtype.name} cannot be reduced; cast it to one of {known}")


def with_dtype(collective: Collective, tensor: tf.Tensor) -> Collective:
    """Adds the tensor's dtype to the collective's name if the tensor travels as another dtype.

    Ranks compare names. Without the dtype, they would not notice bool on one rank and int8 on
    another, because both travel as uint8.
    """
    if tensor.dtype in NATIVE_DTYPES:
        return collective
    return replace(collective, label=collective.label.of_dtype(tensor.dtype.name))


def as_native_bits(
    tensor: tf.Tensor, label: str
) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    """Encodes a tensor's bits in one of `NATIVE_DTYPES`.

    Returns:
        The encoded tensor and a function that decodes a result. Elements that become several
        numbers, such as a real and an imaginary part, add a last dimension.

    Raises:
        TypeError: The dtype has no fixed width.
    """
    dtype = tensor.dtype
    if dtype in NATIVE_DTYPES:
        return tensor, lambda result: result
    if dtype == tf.bool:
        return tf.cast(tensor, tf.uint8), lambda result: tf.cast(result, tf.bool)
    if dtype.is_complex:
        # TensorFlow differentiates these ops, but not a bitcast.
        parts = tf.stack([tf.math.real(tensor), tf.math.imag(tensor)], -1)
        return parts, lambda result: tf.complex(result[..., 0], result[..., 1])
    if dtype in (tf.string, tf.variant, tf.resource):
        raise TypeError(f"{label}: {dtype.name} has no fixed width and cannot be sent")
    try:
        bits = tf.bitcast(tensor, tf.uint8)
    except (tf.errors.InvalidArgumentError, TypeError, ValueError) as error:
        raise TypeError(f"{label}: {dtype.name} cannot be sent; cast it to another type") from error
    return bits, lambda result: tf.bitcast(result, dtype)
