"""Time that this process has waited for batches of strategies' distributed datasets.

Keras' `fit`, like many loops, takes a batch inside a `tf.function`, where no Python code runs. So
the graph itself reads the clock before and after each batch, once `watch` has been called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from gradring.tensorflow.graph import compat

#: Seconds; None before the first call of `watch`.
_total: Any = None


def watch() -> bool:
    """Starts to measure in code that is traced from now on; returns False if it already did."""
    global _total
    if _total is not None:
        return False
    _total = compat.plain_variable(0.0, "gradring_input_s", tf.float64)
    iterator = "_SingleWorkerDatasetIteratorBase"
    names = f"{iterator}.get_next_as_list", f"{iterator}.get_next_as_optional_list"
    compat.replace(dict.fromkeys(names, _timed), traced=True)
    return True


def seconds() -> float:
    """Returns the seconds of waiting since `watch`."""
    return float(_total)


def _timed(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with tf.device("/device:CPU:0"):
        before = tf.timestamp()
    with tf.control_dependencies([before]):
        batch = original(*args, **kwargs)
    tensors = tf.nest.flatten(batch, expand_composites=True)
    with tf.device("/device:CPU:0"), tf.control_dependencies(tensors):
        # The op takes a bare handle: `broadcast_update` would broadcast an assigned variable.
        tf.raw_ops.AssignAddVariableOp(resource=_total.handle, value=tf.timestamp() - before)
    return batch
