"""`gradring.updates.Bits16`: gradients as 16-bit floats."""

from __future__ import annotations

import tensorflow as tf


class Bits16:
    """A `Codec` that rounds to 16-bit floats."""

    #: Arbitrary length of rows; the padding of a bucket is at most 510 bytes per rank.
    block = 256

    def __init__(self, dtype: str) -> None:
        """Takes the dtype's name."""
        self._dtype = tf.as_dtype(dtype)

    def encode(self, vector: tf.Tensor) -> tf.Tensor:
        """Rounds to nearest, ties to even."""
        rounded = tf.bitcast(tf.cast(vector, self._dtype), tf.uint8)
        return tf.reshape(rounded, [-1, 2 * self.block])

    def decode(self, rows: tf.Tensor) -> tf.Tensor:
        """Converts to float32, which is exact."""
        return tf.cast(tf.bitcast(tf.reshape(rows, [-1, 2]), self._dtype), tf.float32)
