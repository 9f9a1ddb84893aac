"""The private parts of TensorFlow that gradring uses; no other file imports any.

Each name below is the same in TensorFlow 2.16 to 2.21.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import (
    collective_all_reduce_strategy,
    cross_device_ops,
    cross_device_utils,
    device_util,
    distribute_lib,
    distribute_utils,
    input_lib,
    multi_worker_util,
    numpy_dataset,
)
from tensorflow.python.distribute import values as distribute_values
from tensorflow.python.eager import context, execute
from tensorflow.python.framework import op_def_library
from tensorflow.python.ops import resource_variable_ops
from tensorflow.python.trackable import base as trackable_base

Strategy = distribute_lib.Strategy
StrategyExtended = distribute_lib.StrategyExtendedV2
ReplicaContext = distribute_lib.ReplicaContext
CollectiveAllReduceExtended = collective_all_reduce_strategy.CollectiveAllReduceExtended
CollectiveAllReduce = cross_device_ops.CollectiveAllReduce
CrossDeviceOps = cross_device_ops.CrossDeviceOps
CollectiveKeys = cross_device_utils.CollectiveKeys
CheckpointInitialValue = trackable_base.CheckpointInitialValue
DistributedValues = distribute_values.DistributedValues
#: Takes batches out of this process's part of a distributed dataset, in graphs too.
WorkerIterator = input_lib._SingleWorkerDatasetIteratorBase

select_replica = distribute_utils.select_replica
canonical_device = device_util.canonicalize
host_of = device_util.get_host_for_device
host_input_device = numpy_dataset.SingleDevice
id_in_cluster = multi_worker_util.id_in_cluster
normalize_cluster_spec = multi_worker_util.normalize_cluster_spec


def mirrored(per_device: Sequence[Any]) -> Any:
    """One value for the same contents on each local device."""
    return distribute_utils.regroup(tuple(per_device), wrap_class=distribute_values.Mirrored)


def ordering_token() -> Any:
    """A scalar resource variable outside every graph, strategy and distribution scope.

    Ops that take its handle keep their program order, also across `tf.cond` and `tf.while_loop`.
    """
    return plain_variable(0.0, "gradring_token")


def plain_variable(value: float, name: str, dtype: Any = tf.float32) -> Any:
    """A scalar outside every graph, strategy and distribution scope."""
    with tf.init_scope(), tf.device("/device:CPU:0"):
        return resource_variable_ops.ResourceVariable(
            value, trainable=False, dtype=dtype, name=name
        )


def add_control_input(op: Any, before: Any) -> None:
    """Lets `op`, of a graph that is still being built, run only after the operation `before`."""
    op._add_control_input(before)


def run_op(
    op: str, inputs: dict[str, Any], dtype: Any, attrs: dict[str, Any], output_count: int
) -> list[Any]:
    """Runs an op at once when executing eagerly, or else adds it to the graph.

    Args:
      op: registered name of the op.
      inputs: a tensor, or a list of tensors, for each input, in the op's order.
      dtype: the `tf.DType` that the op calls T.
      attrs: str or int for each attribute that the inputs do not imply.
      output_count: number of output tensors.

    Returns:
      The flat list of output tensors.
    """
    flat: list[Any] = []
    named: dict[str, Any] = {"T": dtype.as_datatype_enum}
    for value in inputs.values():
        if isinstance(value, list):
            named["N"] = len(value)
            flat.extend(value)
        else:
            flat.append(value)
    encoded: list[Any] = []
    for name, value in (named | attrs).items():
        encoded += [name, value.encode() if isinstance(value, str) else value]
    if tf.executing_eagerly():
        results = execute.execute(
            op.encode(), output_count, inputs=flat, attrs=tuple(encoded), ctx=context.context()
        )
    else:
        *_, results = op_def_library._apply_op_helper(op, **inputs, **attrs)
    if execute.must_record_gradient():
        execute.record_gradient(op, flat, tuple(encoded), results)
    return list(results)
