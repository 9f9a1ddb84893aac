"""`horovod.tensorflow.keras`, over gradring: ``import gradring.horovod.tensorflow.keras as hvd``.

Works with Keras 3, and with `tf_keras` if TensorFlow uses it (``TF_USE_LEGACY_KERAS=1``).
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
from gradring.horovod.tensorflow.sharded_optimizer import ALL_REDUCE
from gradring.updates import Rule

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
__dir__ = __all__.copy


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
    *,
    update: Rule = ALL_REDUCE,
) -> Any:
    """Calls `gradring.horovod.tensorflow.DistributedOptimizer`; the order of arguments differs.

    Args:
        optimizer: An optimizer of Keras.
        name: Has no effect.
        device_dense: Has no effect: tensors are on CPUs.
        device_sparse: Has no effect.
        compression: Compression on the wire.
        sparse_as_dense: Makes `tf.IndexedSlices` dense before the reduction.
        gradient_predivide_factor: Divisor before the sum of an average, and factor after it.
        op: Average or Sum.
        backward_passes_per_step: Number of steps whose gradients are added up before their sum is
            reduced and applied.
        average_aggregated_gradients: Divides the sum by `backward_passes_per_step`.
        num_groups: The older form of `groups`.
        groups: Has no effect: gradients are reduced in buckets of bytes.
        process_set: The participating processes.
        scale_local_gradients: Divides the gradients of local variables by the number of ranks.
        update: As in `gradring.horovod.tensorflow.DistributedOptimizer`.

    Examples:
        >>> layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        >>> model = keras.Sequential([keras.layers.Input((1,)), layer])
        >>> sgd = keras.optimizers.SGD(0.1)
        >>> model.compile(hvd.DistributedOptimizer(sgd, backward_passes_per_step=2), "mse")
        >>> x = np.full((4, 1), hvd.rank() + 1.0)
        >>> history = model.fit(x, 5 * x, batch_size=2, verbose=0)  # an update of two batches
        >>> model.get_weights()
        [array([[5.]], dtype=float32)]
    """
    arguments = {name: value for name, value in locals().items() if name != "optimizer"}
    return _optimizers.DistributedOptimizer(optimizer, **arguments)


def PartialDistributedOptimizer(
    optimizer: Any, *args: Any, local_layers: Any = (), **kwargs: Any
) -> Any:
    """Returns a `DistributedOptimizer` that does not reduce the gradients of some layers.

    Args:
        optimizer: As in `DistributedOptimizer`.
        args: As in `DistributedOptimizer`.
        local_layers: One or several layers.
        kwargs: As in `DistributedOptimizer`.

    Examples:
        >>> shared, own = (
        ...     keras.layers.Dense(1, use_bias=False, kernel_initializer="ones") for _ in range(2)
        ... )
        >>> model = keras.Sequential([keras.layers.Input((1,)), shared, own])
        >>> sgd = keras.optimizers.SGD(0.5)
        >>> model.compile(hvd.PartialDistributedOptimizer(sgd, local_layers=own), "mae")
        >>> history = model.fit(np.full((4, 1), hvd.rank() + 1.0), np.zeros((4, 1)), verbose=0)
        >>> [weights.item() for weights in model.get_weights()]  # 1 - 0.5 * 1.5, 1 - 0.5 * 1 / 2
        [0.25, 0.75]
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
    *,
    update: Rule = ALL_REDUCE,
) -> Any:
    """Loads a model as Keras does; its optimizer keeps its state and reduces gradients.

    Args:
        filepath: A file saved with a distributed or an ordinary optimizer.
        custom_optimizers: Classes of optimizers that Keras does not know.
        custom_objects: As in Keras.
        compression: Compression on the wire.
        legacy_opts: Has no effect.
        update: As in `DistributedOptimizer`. Under `gradring.updates.Sharded()`, each rank holds
            its part of the loaded state.

    Examples:
        >>> layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        >>> model = keras.Sequential([keras.layers.Input((1,)), layer])
        >>> model.compile(keras.optimizers.SGD(0.1), "mse")
        >>> if hvd.rank() == 0:
        ...     model.save("model.keras")
        >>> model = hvd.load_model(hvd.broadcast_object("model.keras", root_rank=0))
        >>> x = np.full((4, 1), hvd.rank() + 1.0)
        >>> history = model.fit(x, 5 * x, verbose=0)  # gradients -10 and -40
        >>> model.get_weights()
        [array([[2.5]], dtype=float32)]
    """
    known = {kind.__name__: kind for kind in custom_optimizers or ()}
    model = tf.keras.models.load_model(filepath, custom_objects={**known, **(custom_objects or {})})
    _optimizers.distribute(model, Options(compression), update)
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
    """Calls `gradring.horovod.tensorflow.allreduce`; the order of arguments differs.

    Args:
        value: A tensor of the same shape and dtype on all ranks, or any value that converts to one.
        name: Compared between ranks, and used in messages.
        average: The older form of `op`: Average or Sum.
        prescale_factor: Factor before the reduction.
        postscale_factor: Factor after the reduction.
        op: The reduction; default Average.
        compression: Compression on the wire.

    Examples:
        >>> hvd.allreduce([1.0, 10.0 * hvd.rank()], "metrics").numpy()
        array([1., 5.], dtype=float32)
        >>> hvd.allreduce([1.0, 10.0 * hvd.rank()], "metrics", op=hvd.Sum).numpy()
        array([ 2., 10.], dtype=float32)
    """
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
    """Calls `gradring.horovod.tensorflow.allgather`.

    Args:
        value: A tensor of at least one dimension, or any value that converts to one.
        name: Compared between ranks, and used in messages.

    Examples:
        >>> hvd.allgather([[hvd.rank(), 7]]).numpy()
        array([[0, 7],
               [1, 7]], dtype=int32)
    """
    return collectives.allgather(value, name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> tf.Tensor:
    """Calls `gradring.horovod.tensorflow.broadcast`.

    Args:
        value: A tensor of the same shape and dtype on all ranks, or any value that converts to one.
        root_rank: The root.
        name: Compared between ranks, and used in messages.

    Examples:
        >>> hvd.broadcast([hvd.rank(), 7], 1).numpy()
        array([1, 7], dtype=int32)
    """
    return collectives.broadcast(value, root_rank, name)


def reducescatter(value: Any, name: str | None = None, op: ReduceOp = Average) -> tf.Tensor:
    """Calls `gradring.horovod.tensorflow.reducescatter`.

    Args:
        value: A tensor of at least one dimension, or any value that converts to one.
        name: Compared between ranks, and used in messages.
        op: Average or Sum.

    Examples:
        >>> hvd.reducescatter([1.0, 2.0], op=hvd.Sum).numpy()  # rank 1 gets [4.]
        array([2.], dtype=float32)
    """
    return collectives.reducescatter(value, op=op, name=name)
