"""Gradring's front end for TensorFlow.

====================================  ==========================================================
name                                  what it does
====================================  ==========================================================
`CustomCollectiveStrategy`            `tf.distribute.MultiWorkerMirroredStrategy` over gradring.
`GradientReducer`                     Reduces a list of gradients, without any strategy.
`MPIClusterResolver`                  Describes processes of ``mpirun`` to tf.distribute.
`ScalarWriter`                        Writes scalars of a `gradring.Monitor` for TensorBoard.
`all_gather`                          Joins every rank's tensor along the first dimension.
`all_reduce`                          Reduces a tensor or a nest of tensors.
`all_to_all`                          Gives every rank its part of each rank's tensor.
`broadcast`                           Gives every rank the root's tensor.
`broadcast_variables`                 Gives every rank the root's variables.
`callbacks`                           Callbacks of Keras' `fit`: `LiveLine`, `CheckReplicas`, ...
`check_replicas`                      Compares the variables of all ranks.
`elastic`                             Restarts: `elastic.State`, `elastic.CommitState`.
`distribute_input`                    Lets the job's input workers read a dataset.
`failure_of`                          Finds gradring's exception behind another one.
`input_service`                       Returns the address of the job's tf.data service.
`join`                                Appends empty batches until the batches of all ranks end.
`measure_overlap`                     Measures how far computation hid the communication.
`reduce_scatter`                      Reduces a tensor and gives every rank its rows.
`restore`                             Restores on every rank from files of `save`.
`sync_replicas`                       Makes replicas equal if an update rule lets them differ.
`save`                                Saves a model or a checkpoint once, called on every rank.
====================================  ==========================================================

All functions but `save`, `restore`, `check_replicas`, `join` and `measure_overlap` work both
eagerly and inside a `tf.function`. None works in code compiled with `jit_compile=True`: XLA has no
kernels for gradring's ops, so this raises a `gradring.errors.ConfigError`. Compile the forward and
backward pass, and reduce outside of the compiled code.

A failed collective raises an exception of `gradring.errors`, such as `PeerLostError`, that names
the rank to blame. An op, a `tf.function`, `fit` and a dataset all raise the same exception. The
exception is also an instance of TensorFlow's class: `tf.errors.AbortedError`, or
`tf.errors.DeadlineExceededError` after a timeout. `failure_of` finds it if another exception was
raised because of it.
"""

import importlib
from typing import Any

from gradring.machine import packages

with packages.needed_by("gradring.tensorflow"):
    import tensorflow  # noqa: F401

from gradring.tensorflow.cluster.mpi_cluster_resolver import MPIClusterResolver
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
    "MPIClusterResolver",
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
__dir__ = __all__.copy


def __getattr__(name: str) -> Any:
    """Imports `callbacks` and `elastic` at their first use, because they import slow Keras."""
    if name in ("callbacks", "elastic"):
        return importlib.import_module(f"gradring.tensorflow.{name}")
    raise AttributeError(f"module 'gradring.tensorflow' has no attribute {name!r}")
