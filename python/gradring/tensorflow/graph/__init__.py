"""Ops of collectives in TensorFlow's graphs, their order, and the reductions of tf.distribute."""
