"""Versions of TensorFlow and Keras with which gradring was tested."""

#: The lowest and the highest tested version of each package.
TRIED = {
    "keras": ("3.3", "3.15.1"),
    "tensorflow": ("2.16", "2.21.0"),
    "tf_keras": ("2.16", "2.21.0"),
}
