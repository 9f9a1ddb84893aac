"""Sums of encoded gradients: each rank owns a part, sums all ranks' encodings of it, sends the sum.

Parts and sums are both encoded. A rank keeps the encoding error of its gradients for the next step,
and an owner keeps that of its sum. All ranks decode the same bytes, so they get the same bits.

A rank sends 2(N-1)/N of the encoded bytes, as an all-reduce does of the plain ones.
"""

from __future__ import annotations

from typing import Protocol

import tensorflow as tf

from gradring.tensorflow.graph.start_wait import start_all_gather, start_all_to_all
from gradring.tensorflow.rules.compression.bucket import Bucket, Compressor, Sending, finite


class Codec(Protocol):
    """An encoding of float32 blocks in fewer bytes."""

    #: Number of elements in a block.
    block: int

    def encode(self, vector: tf.Tensor) -> tf.Tensor:
        """Returns a row of uint8 for each block of a float32 vector of whole blocks.

        An infinity or NaN must decode to a value that is not finite; it may affect its whole block.
        """

    def decode(self, rows: tf.Tensor) -> tf.Tensor:
        """Returns the float32 vector; equal bytes must give equal bits on every host."""


class SumByOwners(Compressor):
    """Sums parts at their owners, encoded by a `Codec`."""

    def __init__(self, codec: Codec) -> None:
        """Takes the codec, and compiles its functions by XLA.

        XLA fuses about a dozen ops into one or two passes over memory.
        """
        self._codec = codec
        self._encode = tf.function(self._encoded, autograph=False, jit_compile=True)
        self._add = tf.function(self._added, autograph=False, jit_compile=True)
        self._decode = tf.function(codec.decode, autograph=False, jit_compile=True)

    def reduce(self, bucket: Bucket) -> Sending:
        """Sends encoded parts to their owners, and gathers the owners' encoded sums."""
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
        """Encodes values plus the previous error, padded to a length; returns rows and error."""
        (count,) = values.shape
        values += before
        rows = self._codec.encode(tf.pad(values, [[0, length - count]]))
        return rows, finite(values - self._codec.decode(rows)[:count])

    def _added(
        self, rows: tf.Tensor, before: tf.Tensor, world_size: int
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Sums the decoded rows of all ranks, and encodes the sum; returns rows and error."""
        parts = tf.reshape(self._codec.decode(rows), [world_size, -1])
        total = parts[0]
        for rank in range(1, world_size):
            total += parts[rank]
        return self._encoded(total, before, total.shape[0])
