"""`gradring.updates.Bits16`: 16-bit floats."""

from __future__ import annotations

import tensorflow as tf


class Bits16:
    """A `Codec`."""

    #: Rows need a length; what is added to a bucket for it is no more than 510 bytes for a rank.
    block = 256

    def __init__(self, dtype: str) -> None:
        """Takes the name of the type."""
        self._dtype = tf.as_dtype(dtype)

    def encode(self, vector: tf.Tensor) -> tf.Tensor:
        """Rounds to even."""
        rounded = tf.bitcast(tf.cast(vector, self._dtype), tf.uint8)
        return tf.reshape(rounded, [-1, 2 * self.block])

    def decode(self, rows: tf.Tensor) -> tf.Tensor:
        """Every 16-bit float is a float32."""
        return tf.cast(tf.bitcast(tf.reshape(rows, [-1, 2]), self._dtype), tf.float32)
