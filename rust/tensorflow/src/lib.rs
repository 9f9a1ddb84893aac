//! TensorFlow ops.
