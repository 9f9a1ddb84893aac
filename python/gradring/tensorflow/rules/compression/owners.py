"""Sums of encoded gradients: each rank owns a part, adds up what all send of it, and sends the sum.

Both ways are encoded: what a rank loses of its gradients, and what an owner loses of the sum, both
keep for the next step. Everybody decodes the same bytes, so all have the same bits.

A rank sends 2(N-1)/N of the encoded bytes, as an all-reduce does of the plain ones.
"""

from __future__ import annotations

from typing import Protocol

import tensorflow as tf

from gradring.tensorflow.graph.start_wait import start_all_gather, start_all_to_all
from gradring.tensorflow.rules.compression.bucket import Bucket, Compressor, Sending, finite


class Codec(Protocol):
    """How numbers are written in fewer bytes, block by block."""

    #: Elements of a block.
    block: int

    def encode(self, vector: tf.Tensor) -> tf.Tensor:
        """A row of uint8 for each block of a float32 vector of whole blocks.

        What is not finite is not finite when it is decoded, or makes others of its block so.
        """

    def decode(self, rows: tf.Tensor) -> tf.Tensor:
        """The float32 vector; the same bits of the same bytes, everywhere."""


class SumByOwners(Compressor):
    """By `Codec`."""

    def __init__(self, codec: Codec) -> None:
        """Takes how parts are written.

        XLA makes one or two passes over memory of what would be a dozen ops.
        """
        self._codec = codec
        self._encode = tf.function(self._encoded, autograph=False, jit_compile=True)
        self._add = tf.function(self._added, autograph=False, jit_compile=True)
        self._decode = tf.function(codec.decode, autograph=False, jit_compile=True)

    def reduce(self, bucket: Bucket) -> Sending:
        """Sends parts to their owners, and gathers the sums."""
        codec, world_size = self._codec, bucket.communicator.world_size
        (count,) = bucket.vector.shape
        blocks = -(-count // (codec.block * world_size))
        chunk = blocks * codec.block

        rows, lost = self._encode(bucket.vector, bucket.kept("lost", [count]), chunk * world_size)
        bucket.keep("lost", lost)
        _, received = yield start_all_to_all(rows, bucket.collective.part("to owners"))
        rows, lost = self._add(received, bucket.kept("lost of the sum", [chunk]), world_size)
        bucket.keep("lost of the sum", lost)
        counts = tf.constant([blocks] * world_size, tf.int64)
        (gathered,) = yield start_all_gather(rows, counts, bucket.collective.part("from owners"))
        return self._decode(tf.ensure_shape(gathered, received.shape))[:count]

    def _encoded(
        self, values: tf.Tensor, before: tf.Tensor, length: int
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Rows of the values, filled up to a length, and what they lose."""
        (count,) = values.shape
        values += before
        rows = self._codec.encode(tf.pad(values, [[0, length - count]]))
        return rows, finite(values - self._codec.decode(rows)[:count])

    def _added(
        self, rows: tf.Tensor, before: tf.Tensor, world_size: int
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Rows of the sum of what all ranks have sent, and what they lose."""
        parts = tf.reshape(self._codec.decode(rows), [world_size, -1])
        total = parts[0]
        for rank in range(1, world_size):
            total += parts[rank]
        return self._encoded(total, before, total.shape[0])
