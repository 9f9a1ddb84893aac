"""Compression of tensors on the wire."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class Compressor:
    """The compressor that does not change tensors."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Returns the tensor to send, and the context for `decompress`."""
        return tensor, None

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Returns the received tensor with its original dtype."""
        return tensor


class FP16Compressor(Compressor):
    """The compressor that rounds floats to float16."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, tf.DType]:
        """Returns the tensor as float16, and its dtype."""
        tensor = tf.convert_to_tensor(tensor)
        dtype = tensor.dtype
        return (tf.cast(tensor, tf.float16) if dtype.is_floating else tensor), dtype

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: tf.DType) -> tf.Tensor:
        """Returns the tensor with its original dtype."""
        return tf.cast(tensor, ctx)


class Compression:
    """The available compressors.

    Examples:
        >>> x = tf.constant([1 / 3, 2.0])
        >>> hvd.allreduce(x, compression=hvd.Compression.none).numpy()
        array([0.33333334, 2.        ], dtype=float32)
        >>> hvd.allreduce(x, compression=hvd.Compression.fp16).numpy()
        array([0.33325195, 2.        ], dtype=float32)
    """

    none = Compressor
    fp16 = FP16Compressor


def checked(compression: Any) -> type[Compressor]:
    """Returns the class if it is a compressor.

    Raises:
        TypeError: The class lacks the methods, as `Compression` itself does.
    """
    if not all(callable(getattr(compression, way, None)) for way in ("compress", "decompress")):
        raise TypeError(
            f"compression={compression!r} cannot compress; pass hvd.Compression.none, "
            "hvd.Compression.fp16, or a class that has compress and decompress"
        )
    way: type[Compressor] = compression
    return way
