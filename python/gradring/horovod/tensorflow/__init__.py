"""`horovod.tensorflow`, over gradring: ``import gradring.horovod.tensorflow as hvd``.

====================  =============================================================
module                what it has
====================  =============================================================
``collectives``       `allreduce`, `allgather`, `broadcast`, `alltoall`, ...
``calls``             what ranks compare before a collective; `join`
``gradients``         `DistributedGradientTape`
``optimizer``         `DistributedOptimizer`
``objects``           `broadcast_object`, `allgather_object`
``elastic``           `State`, `run`
``keras``             `horovod.tensorflow.keras`: callbacks
====================  =============================================================
"""

import importlib
from typing import Any

from gradring.horovod.basics import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from gradring.horovod.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from gradring.horovod.tensorflow.calls import join
from gradring.horovod.tensorflow.collectives import (
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    broadcast_,
    broadcast_global_variables,
    broadcast_variables,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    local_rank_op,
    local_size_op,
    rank_op,
    reducescatter,
    size_op,
)
from gradring.horovod.tensorflow.compression import Compression
from gradring.horovod.tensorflow.gradients import (
    DistributedGradientTape,
    PartialDistributedGradientTape,
)
from gradring.horovod.tensorflow.objects import (
    allgather_object,
    broadcast_object,
    broadcast_object_fn,
)
from gradring.horovod.tensorflow.optimizer import DistributedOptimizer
from gradring.horovod.tensorflow.reduce_ops import Adasum, Average, Max, Min, Product, Sum

#: Modules that import Keras, which takes a while.
_LATER = ("elastic", "keras")

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNormalization",  # noqa: F822 (imported by __getattr__)
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",  # noqa: F822 (imported by __getattr__)
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "keras",  # noqa: F822 (imported by __getattr__)
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stop_timeline",
]


def __getattr__(name: str) -> Any:
    """Imports what imports Keras when it is first used."""
    if name in _LATER:
        return importlib.import_module(f"{__name__}.{name}")
    if name == "SyncBatchNormalization":
        return importlib.import_module(f"{__name__}.sync_batch_norm").SyncBatchNormalization
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names."""
    return list(__all__)
