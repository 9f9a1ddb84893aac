"""The datasets of a rank: their order on all ranks, their iterators, tf.data service."""
