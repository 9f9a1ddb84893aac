"""`gradring.updates.PowerSGD`: matrices as products of smaller ones.

M is a gradient as a matrix, with what it has lost. P = orthonormal(sum of M Q), where Q is left
from the step before; then Q = sum of M^T P. The sum of all M is taken to be P Q^T: what the columns
of P span of it. A rank has lost M - P P^T M.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

from gradring.tensorflow.graph.start_wait import start
from gradring.tensorflow.rules.compression.bucket import Bucket, Compressor, Sending, finite

#: Of a column, what is left of it when it has no direction of its own; else, rounding errors.
_NOTHING = 1e-5


class LowRank(Compressor):
    """Sends two matrices in place of each."""

    def __init__(self, rank: int) -> None:
        """Takes the rank of the products."""
        self._rank = rank

    def takes(self, shape: Sequence[int]) -> bool:
        """Whether the two matrices have fewer elements than their product."""
        rows, columns = math.prod(shape[:-1]), shape[-1]
        return self._rank * (rows + columns) < rows * columns

    def reduce(self, bucket: Bucket) -> Sending:
        """Adds up one of the matrices, and then the other."""
        own = bucket.with_lost("lost", bucket.vector)
        matrices = [tf.reshape(part, [-1, part.shape[-1]]) for part in bucket.split(own)]
        left = [
            tf.matmul(matrix, self._right(bucket, number, matrix.shape[1]))
            for number, matrix in enumerate(matrices)
        ]
        left = yield start(left, bucket.collective.part("left"))
        left = [_orthonormal(columns) for columns in left]
        right = [tf.matmul(m, p, transpose_a=True) for m, p in zip(matrices, left, strict=True)]
        bucket.keep("lost", finite(own - _products(left, right)))
        right = yield start(right, bucket.collective.part("right"))
        for number, columns in enumerate(right):
            bucket.keep(f"right {number}", finite(columns))
        return _products(left, right)

    def _right(self, bucket: Bucket, number: int, columns: int) -> tf.Tensor:
        """Q of the step before; random columns, the same on all ranks, where it has none."""
        shape = [columns, self._rank]
        before = bucket.kept(f"right {number}", shape)
        random = tf.random.stateless_normal(shape, [number, columns])
        return tf.where(tf.norm(before, axis=0) > 0, before, random)


def _products(left: Sequence[tf.Tensor], right: Sequence[tf.Tensor]) -> tf.Tensor:
    pairs = zip(left, right, strict=True)
    products = [tf.matmul(p, q, transpose_b=True) for p, q in pairs]
    return tf.concat([tf.reshape(product, [-1]) for product in products], 0)


def _orthonormal(matrix: tf.Tensor) -> tf.Tensor:
    """By Gram and Schmidt; columns without a direction of their own become zeros."""
    rest, done = matrix, []
    lengths = tf.norm(matrix, axis=0)
    for column in range(matrix.shape[1]):
        length = tf.norm(rest[:, column])
        small = length <= _NOTHING * lengths[column]
        unit = tf.where(small, 0.0, rest[:, column] / length)[:, tf.newaxis]
        done.append(unit)
        rest -= tf.matmul(unit, tf.matmul(unit, rest, transpose_a=True))
    return tf.concat(done, 1)
