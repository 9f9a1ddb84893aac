"""`gradring.updates.PowerSGD`: matrices as products of smaller ones.

M is a rank's gradient as a matrix, plus its kept compression error. P = orthonormal(sum of M Q),
where Q comes from the previous step; then Q = sum of M^T P. The sum of all M is approximated by
P Q^T, its projection on the columns of P. A rank keeps the error M - P P^T M.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

from gradring.tensorflow.graph.start_wait import start
from gradring.tensorflow.rules.compression.bucket import Bucket, Compressor, Sending, finite

#: A column whose length shrinks below this fraction depends on earlier columns; the rest of it is
#: rounding error.
_NOTHING = 1e-5


class LowRank(Compressor):
    """Sends two thin matrices instead of each gradient."""

    def __init__(self, rank: int) -> None:
        """Takes the rank of the product: the number of columns of P and Q."""
        self._rank = rank

    def takes(self, shape: Sequence[int]) -> bool:
        """Returns whether the two matrices have fewer elements than their product."""
        rows, columns = math.prod(shape[:-1]), shape[-1]
        return self._rank * (rows + columns) < rows * columns

    def reduce(self, bucket: Bucket) -> Sending:
        """Sums the matrices M Q over the ranks, then M^T P, and returns the products."""
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
        """Returns Q of the previous step; columns of zeros become random, equal on all ranks."""
        shape = [columns, self._rank]
        before = bucket.kept(f"right {number}", shape)
        random = tf.random.stateless_normal(shape, [number, columns])
        return tf.where(tf.norm(before, axis=0) > 0, before, random)


def _products(left: Sequence[tf.Tensor], right: Sequence[tf.Tensor]) -> tf.Tensor:
    pairs = zip(left, right, strict=True)
    products = [tf.matmul(p, q, transpose_b=True) for p, q in pairs]
    return tf.concat([tf.reshape(product, [-1]) for product in products], 0)


def _orthonormal(matrix: tf.Tensor) -> tf.Tensor:
    """Orthonormalises columns by Gram-Schmidt; linearly dependent columns become zeros."""
    rest, done = matrix, []
    lengths = tf.norm(matrix, axis=0)
    for column in range(matrix.shape[1]):
        length = tf.norm(rest[:, column])
        small = length <= _NOTHING * lengths[column]
        unit = tf.where(small, 0.0, rest[:, column] / length)[:, tf.newaxis]
        done.append(unit)
        rest -= tf.matmul(unit, tf.matmul(unit, rest, transpose_a=True))
    return tf.concat(done, 1)
