"""The time that this process has stood still for batches of strategies' distributed datasets.

Keras' `fit`, and many a loop, takes a batch inside a `tf.function`, where Python sees nothing of
it. So the graph itself looks at the clock, before and after, once somebody has asked for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from gradring.tensorflow.graph import compat

#: Seconds; None until somebody asks.
_total: Any = None


def watch() -> bool:
    """Counts from now on, what is traced from now on; whether this is the first time."""
    global _total
    if _total is not None:
        return False
    _total = compat.plain_variable(0.0, "gradring_input_s", tf.float64)
    iterator = "_SingleWorkerDatasetIteratorBase"
    names = f"{iterator}.get_next_as_list", f"{iterator}.get_next_as_optional_list"
    compat.replace(dict.fromkeys(names, _timed), traced=True)
    return True


def seconds() -> float:
    """So far, since `watch`."""
    return float(_total)


def _timed(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with tf.device("/device:CPU:0"):
        before = tf.timestamp()
    with tf.control_dependencies([before]):
        batch = original(*args, **kwargs)
    tensors = tf.nest.flatten(batch, expand_composites=True)
    with tf.device("/device:CPU:0"), tf.control_dependencies(tensors):
        # By its handle: what a function assigns is its own, as `broadcast_update` sees it.
        tf.raw_ops.AssignAddVariableOp(resource=_total.handle, value=tf.timestamp() - before)
    return batch
