"""``python with_dense_gradients.py PROGRAM ...``: the program, with Keras' embeddings made dense.

Keras' optimizers take rows of equal index one by one, so that Adam squares each of them. Without a
strategy nobody adds them up before; gradring does, and so does the dense gradient.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf


def _dense(gradient: Any) -> Any:
    is_sparse = isinstance(gradient, tf.IndexedSlices)
    return tf.convert_to_tensor(gradient) if is_sparse else gradient


def make_dense(optimizer: Any) -> None:
    """Changes the class: gradients are dense before they are clipped or applied."""
    apply = optimizer.apply

    def apply_dense(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        return apply(self, [_dense(gradient) for gradient in grads], trainable_variables)

    optimizer.apply = apply_dense


if __name__ == "__main__":
    make_dense(keras.optimizers.Optimizer)
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
