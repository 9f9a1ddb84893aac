"""Compression of gradients before they travel."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class Compressor:
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """The tensor that travels, and what `decompress` needs."""
        return tensor, None

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """The tensor as it was, as far as it travelled."""
        return tensor


class FP16Compressor(Compressor):
    """Rounds floats to float16 on the way."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, tf.DType]:
        """As float16, and its dtype."""
        tensor = tf.convert_to_tensor(tensor)
        dtype = tensor.dtype
        return (tf.cast(tensor, tf.float16) if dtype.is_floating else tensor), dtype

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: tf.DType) -> tf.Tensor:
        """With the dtype that it had."""
        return tf.cast(tensor, ctx)


class Compression:
    """The ways to compress.

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
    """The same, if it can compress.

    Raises:
        TypeError: It cannot, such as `Compression` itself.
    """
    if not all(callable(getattr(compression, way, None)) for way in ("compress", "decompress")):
        raise TypeError(
            f"compression={compression!r} cannot compress; pass hvd.Compression.none, "
            "hvd.Compression.fp16, or a class that has compress and decompress"
        )
    way: type[Compressor] = compression
    return way
