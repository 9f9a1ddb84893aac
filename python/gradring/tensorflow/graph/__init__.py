"""Ops of collectives in TensorFlow's graphs, and the order that they keep."""
