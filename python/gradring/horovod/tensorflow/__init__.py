"""`horovod.tensorflow`, over gradring: ``import gradring.horovod.tensorflow as hvd``.

====================  =============================================================
module                contents
====================  =============================================================
``collectives``       `allreduce`, `allgather`, `broadcast`, `alltoall`, ...
``calls``             comparison of calls before a collective; `join`
``gradients``         `DistributedGradientTape`
``optimizer``         `DistributedOptimizer`
``sessions``          an optimizer and a hook for sessions of TensorFlow 1
``objects``           `broadcast_object`, `allgather_object`
``elastic``           `State`, `run`
``keras``             `horovod.tensorflow.keras`: callbacks
====================  =============================================================

Examples:
    >>> hvd.init()
    >>> hvd.is_initialized()
    True
    >>> hvd.rank(), hvd.size()
    (0, 2)
    >>> hvd.local_rank(), hvd.local_size()  # on this host
    (0, 2)
    >>> hvd.cross_rank(), hvd.cross_size()  # of the hosts that have such a local rank
    (0, 1)
    >>> hvd.is_homogeneous()
    True
    >>> tf.stack([hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op()]).numpy()
    array([0, 2, 0, 2], dtype=int32)
    >>> hvd.gloo_built() and hvd.gloo_enabled()  # gradring's core is in Gloo's place
    True
    >>> hvd.mpi_built() or hvd.mpi_enabled() or hvd.mpi_threads_supported()
    False
    >>> hvd.cuda_built() or hvd.rocm_built() or hvd.ddl_built() or hvd.ccl_built()
    False
    >>> hvd.nccl_built()
    0
    >>> x = tf.constant([1.0, 2.0]) * (hvd.rank() + 1)  # [1, 2] and [2, 4]
    >>> for op in hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product:
    ...     hvd.allreduce(x, op=op, process_set=hvd.global_process_set).numpy()
    array([1.5, 3. ], dtype=float32)
    array([3., 6.], dtype=float32)
    array([1., 2.], dtype=float32)
    array([2., 4.], dtype=float32)
    array([2., 8.], dtype=float32)
    >>> hvd.allreduce(x, op=hvd.Adasum)
    Traceback (most recent call last):
    NotImplementedError: Adasum: gradring does not have it; use op=hvd.Average, ...
    >>> hvd.start_timeline("timeline.json")
    >>> average = hvd.allreduce(x, name="x")
    >>> hvd.stop_timeline()  # rank 0 has written the file
    >>> hvd.shutdown()
    >>> hvd.is_initialized()
    False
"""

import importlib
from typing import TYPE_CHECKING, Any

from gradring.machine import packages

with packages.needed_by("gradring.horovod.tensorflow"):
    import tensorflow as tf

from gradring import _native
from gradring.horovod import basics, process_sets
from gradring.horovod.basics import *  # noqa: F403
from gradring.horovod.process_sets import *  # noqa: F403
from gradring.horovod.tensorflow import collectives, gradients, objects, reduce_ops
from gradring.horovod.tensorflow.calls import join
from gradring.horovod.tensorflow.collectives import *  # noqa: F403
from gradring.horovod.tensorflow.compression import Compression
from gradring.horovod.tensorflow.gradients import *  # noqa: F403
from gradring.horovod.tensorflow.objects import *  # noqa: F403
from gradring.horovod.tensorflow.optimizer import DistributedOptimizer
from gradring.horovod.tensorflow.reduce_ops import *  # noqa: F403
from gradring.horovod.tensorflow.sessions import BroadcastGlobalVariablesHook

if TYPE_CHECKING:
    from gradring.horovod.tensorflow.sync_batch_norm import SyncBatchNormalization

#: Private in Horovod, but used by programs.
_executing_eagerly = tf.executing_eagerly

# Importing a graph with collectives, such as a checkpoint's, requires the registered ops.
_native.tensorflow_register()

#: Modules that import Keras, which is slow.
_LATER = ("elastic", "keras")

__all__ = [
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedOptimizer",
    "SyncBatchNormalization",
    "elastic",  # noqa: F405 (imported by __getattr__)
    "join",
    "keras",  # noqa: F405 (imported by __getattr__)
]
__all__ += basics.__all__
__all__ += process_sets.__all__
__all__ += collectives.__all__
__all__ += gradients.__all__
__all__ += objects.__all__
__all__ += reduce_ops.__all__
__dir__ = __all__.copy


def __getattr__(name: str) -> Any:
    """Imports modules that need Keras at their first use."""
    if name in _LATER:
        return importlib.import_module(f"{__name__}.{name}")
    if name == "SyncBatchNormalization":
        return importlib.import_module(f"{__name__}.sync_batch_norm").SyncBatchNormalization
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
