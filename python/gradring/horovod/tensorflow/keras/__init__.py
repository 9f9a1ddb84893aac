"""`horovod.tensorflow.keras`, over gradring: ``import gradring.horovod.tensorflow.keras as hvd``.

For Keras 3, and for `tf_keras` where TensorFlow uses it (``TF_USE_LEGACY_KERAS=1``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from gradring.horovod import basics, process_sets
from gradring.horovod.basics import *  # noqa: F403
from gradring.horovod.process_sets import *  # noqa: F403
from gradring.horovod.tensorflow import collectives
from gradring.horovod.tensorflow import optimizer as _optimizers
from gradring.horovod.tensorflow.compression import Compression, Compressor
from gradring.horovod.tensorflow.gradients import Options, trainable_in
from gradring.horovod.tensorflow.keras import callbacks, elastic
from gradring.horovod.tensorflow.objects import allgather_object, broadcast_object
from gradring.horovod.tensorflow.reduce_ops import Average, ReduceOp, Sum

__all__ = [
    "Average",
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "Sum",
    "allgather",
    "allgather_object",
    "allreduce",
    "broadcast",
    "broadcast_object",
    "callbacks",
    "elastic",
    "load_model",
    "reducescatter",
]
__all__ += basics.__all__
__all__ += process_sets.__all__


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Any] | None = None,
    process_set: process_sets.ProcessSet = process_sets.global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """As `gradring.horovod.tensorflow.DistributedOptimizer`, its arguments in another order."""
    arguments = {name: value for name, value in locals().items() if name != "optimizer"}
    return _optimizers.DistributedOptimizer(optimizer, **arguments)


def PartialDistributedOptimizer(
    optimizer: Any, *args: Any, local_layers: Any = (), **kwargs: Any
) -> Any:
    """A `DistributedOptimizer` that keeps the gradients of some layers on their rank.

    Args:
        optimizer: As for `DistributedOptimizer`.
        args: As for `DistributedOptimizer`.
        local_layers: A layer, or several.
        kwargs: As for `DistributedOptimizer`.
    """
    made = DistributedOptimizer(optimizer, *args, **kwargs)
    for variable in trainable_in(local_layers):
        made.register_local_var(variable)
    return made


def load_model(
    filepath: str | os.PathLike[str],
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: type[Compressor] = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """As Keras' `load_model`; the model's optimizer, with its state, reduces gradients.

    Args:
        filepath: What was saved, with this optimizer or an ordinary one.
        custom_optimizers: Classes of optimizers that Keras does not know.
        custom_objects: As for Keras.
        compression: How gradients travel.
        legacy_opts: Has no effect.
    """
    known = {kind.__name__: kind for kind in custom_optimizers or ()}
    model = tf.keras.models.load_model(filepath, custom_objects={**known, **(custom_objects or {})})
    _optimizers.distribute(model.optimizer, Options(compression))
    return model


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: ReduceOp | None = None,
    compression: type[Compressor] = Compression.none,
) -> tf.Tensor:
    """As `gradring.horovod.tensorflow.allreduce`, its arguments in another order."""
    return collectives.allreduce(
        value,
        average,
        compression=compression,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        name=name,
    )


def allgather(value: Any, name: str | None = None) -> tf.Tensor:
    """As `gradring.horovod.tensorflow.allgather`."""
    return collectives.allgather(value, name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> tf.Tensor:
    """As `gradring.horovod.tensorflow.broadcast`."""
    return collectives.broadcast(value, root_rank, name)


def reducescatter(value: Any, name: str | None = None, op: ReduceOp = Average) -> tf.Tensor:
    """As `gradring.horovod.tensorflow.reducescatter`."""
    return collectives.reducescatter(value, op=op, name=name)
