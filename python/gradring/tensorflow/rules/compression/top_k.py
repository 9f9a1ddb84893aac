"""`gradring.updates.TopK`: the elements of largest absolute value, with their positions."""

from __future__ import annotations

import math

import tensorflow as tf

from gradring.tensorflow.graph.start_wait import start_all_gather
from gradring.tensorflow.rules.compression.bucket import Bucket, Compressor, Sending, finite


class LargestElements(Compressor):
    """Sends the largest elements, and keeps the others for the next step."""

    def __init__(self, fraction: float) -> None:
        """Takes the fraction of a bucket's elements to send."""
        self._fraction = fraction

    def reduce(self, bucket: Bucket) -> Sending:
        """Gathers all ranks' largest elements, and sums those of one position in rank order."""
        world_size = bucket.communicator.world_size
        (count,) = bucket.vector.shape
        sent = math.ceil(self._fraction * count)

        own = bucket.with_lost("lost", bucket.vector)
        _, places = tf.math.top_k(tf.abs(own), sent, sorted=False)
        values = tf.gather(own, places)
        kept = tf.tensor_scatter_nd_update(own, places[:, tf.newaxis], tf.zeros_like(values))
        bucket.keep("lost", finite(kept))
        # An infinity or NaN makes the sent elements NaN even if it is not among them.
        values += tf.where(tf.reduce_all(tf.math.is_finite(own)), 0.0, math.nan)

        pairs = tf.stack([tf.bitcast(values, tf.int32), places])[tf.newaxis]
        counts = tf.ones([world_size], tf.int64)
        (gathered,) = yield start_all_gather(pairs, counts, bucket.collective.part("largest"))
        gathered = tf.ensure_shape(gathered, [world_size, 2, sent])
        values = tf.reshape(tf.bitcast(gathered[:, 0], tf.float32), [-1])
        places = tf.reshape(gathered[:, 1], [-1])
        return tf.math.unsorted_segment_sum(values, places, count)
