"""gradring inside TensorFlow.

====================================  ==========================================================
name                                  what it does
====================================  ==========================================================
`CustomCollectiveStrategy`            `tf.distribute.MultiWorkerMirroredStrategy` over gradring
`GradientReducer`                     reduces a list of gradients, without any strategy
`ScalarWriter`                        writes the numbers of a `gradring.Monitor` for TensorBoard
`all_gather`                          joins every rank's tensor along the first dimension
`all_reduce`                          reduces a tensor or a nest of tensors
`all_to_all`                          gives every rank its part of each rank's tensor
`broadcast`                           gives every rank the root's tensor
`broadcast_variables`                 gives every rank the root's variables
`callbacks`                           for Keras' `fit`: `LiveLine`, `CheckReplicas`, ...
`check_replicas`                      compares the variables of all ranks
`elastic`                             for restarts: `elastic.State`, `elastic.CommitState`
`distribute_input`                    has the job's input workers read a dataset
`failure_of`                          finds gradring's exception behind another one
`input_service`                       where the job's tf.data service is
`join`                                goes on with empty batches until every rank's have ended
`measure_overlap`                     how much communication was hidden behind computation
`reduce_scatter`                      reduces a tensor and gives every rank its rows
`restore`                             restores on every rank what `save` has saved
`sync_replicas`                       makes replicas equal where an update rule lets them differ
`save`                                saves a model or a checkpoint once, called on every rank
====================================  ==========================================================

All but `save`, `restore`, `check_replicas`, `join` and `measure_overlap` work eagerly and inside a
`tf.function`. None works in code compiled with `jit_compile=True`: XLA has no kernel for gradring's
ops, which is a `gradring.errors.ConfigError`. Compile the forward and backward pass, and reduce
outside of it.

A collective that fails raises an exception of `gradring.errors`, such as `PeerLostError`, that
names the rank to blame, wherever it surfaces: from an op, a `tf.function`, `fit`, a dataset. It is
also the one that TensorFlow makes of it: a `tf.errors.AbortedError`, or a
`tf.errors.DeadlineExceededError` when its time is over. `failure_of` finds it behind exceptions
that were raised because of it.
"""

import importlib
from typing import Any

from gradring.machine import packages

with packages.needed_by("gradring.tensorflow"):
    import tensorflow  # noqa: F401

from gradring.tensorflow.data.input_service import distribute_input, input_service
from gradring.tensorflow.files.restore import restore
from gradring.tensorflow.files.save import save
from gradring.tensorflow.gradient_reducer import GradientReducer
from gradring.tensorflow.graph.failures import failure_of
from gradring.tensorflow.graph.ops import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    broadcast_variables,
    reduce_scatter,
)
from gradring.tensorflow.graph.overlap import Overlap, measure_overlap
from gradring.tensorflow.keras.scalars import ScalarWriter
from gradring.tensorflow.replicas import check_replicas
from gradring.tensorflow.rules.replicas import sync_replicas
from gradring.tensorflow.strategy import CustomCollectiveStrategy
from gradring.tensorflow.uneven import join

__all__ = [
    "CustomCollectiveStrategy",
    "GradientReducer",
    "Overlap",
    "ScalarWriter",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "broadcast_variables",
    "callbacks",  # noqa: F822 (imported by __getattr__)
    "check_replicas",
    "distribute_input",
    "elastic",  # noqa: F822 (imported by __getattr__)
    "failure_of",
    "input_service",
    "join",
    "measure_overlap",
    "reduce_scatter",
    "restore",
    "save",
    "sync_replicas",
]


def __getattr__(name: str) -> Any:
    """Imports what imports Keras, which takes a while, when it is first used."""
    if name in ("callbacks", "elastic"):
        return importlib.import_module(f"gradring.tensorflow.{name}")
    raise AttributeError(f"module 'gradring.tensorflow' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names; everything else in this package is its own business."""
    return list(__all__)
