"""Versions of TensorFlow and Keras with which gradring was tried."""

#: The lowest and the highest, by package.
TRIED = {
    "keras": ("3.3", "3.15.1"),
    "tensorflow": ("2.16", "2.21.0"),
    "tf_keras": ("2.16", "2.21.0"),
}
