"""`gradring.updates.Int8`: a byte for each element, and a float32 for each block."""

from __future__ import annotations

import math

import tensorflow as tf


class Int8:
    """A `Codec` that stores each element as a multiple of its block's scale."""

    block = 256

    def encode(self, vector: tf.Tensor) -> tf.Tensor:
        """Returns rows of multiples from -127 to 127, followed by the block's float32 scale."""
        blocks = tf.reshape(vector, [-1, self.block])
        largest = tf.reduce_max(tf.abs(blocks), 1, keepdims=True)
        multiples = tf.round(blocks * tf.math.divide_no_nan(127.0, largest))
        # An integer cannot represent infinities and NaNs, so the scale becomes NaN.
        multiples = tf.where(tf.math.is_finite(multiples), multiples, 0.0)
        is_finite = tf.reduce_all(tf.math.is_finite(blocks), 1, keepdims=True)
        scale = tf.where(is_finite, largest / 127.0, math.nan)
        numbers = tf.bitcast(tf.cast(multiples, tf.int8), tf.uint8)
        scales = tf.reshape(tf.bitcast(scale, tf.uint8), [-1, 4])
        return tf.concat([numbers, scales], 1)

    def decode(self, rows: tf.Tensor) -> tf.Tensor:
        """Multiplies by the scale; a single multiplication rounds equally on all hosts."""
        numbers = tf.bitcast(rows[:, : self.block], tf.int8)
        scales = tf.bitcast(tf.reshape(rows[:, self.block :], [-1, 1, 4]), tf.float32)
        return tf.reshape(tf.cast(numbers, tf.float32) * scales, [-1])
