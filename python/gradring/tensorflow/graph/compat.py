"""TensorFlow's private names, under names of gradring's own; no other file uses private names.

The table of these names is `seams/tensorflow_names.py`. This module looks up every row when it is
imported, before anything is replaced.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import tensorflow as tf

from gradring.tensorflow.seams import table
from gradring.tensorflow.seams.table import Replacement, Seam, find
from gradring.tensorflow.seams.tensorflow_names import TABLE

FOUND = find("tensorflow", TABLE)
FOUND.check()

_ROWS = {seam.key: seam for seam in TABLE}


def row(key: str) -> Seam:
    """Returns the row of the table with this key, such as ``Graph._get_function``."""
    return _ROWS[key]


def named(key: str) -> Any:
    """Returns TensorFlow's object for a row; None if an optional name is missing."""
    return FOUND.value(_ROWS[key])


def has(*keys: str) -> bool:
    """Returns whether TensorFlow has all of these optional names."""
    return all(row(key) in FOUND.owners for key in keys)


def replace(
    stand_ins: Mapping[str, Callable[..., Any]],
    *,
    applies: Callable[..., bool] = lambda *_: True,
    traced: bool = False,
) -> None:
    """Replaces functions of TensorFlow by stand-ins: all or none.

    Args:
        stand_ins: Stand-ins by the key of their row. Each is called with the original function and
            then the arguments of the call.
        applies: Takes the first argument of a call; the original runs where it returns False.
        traced: Whether code that AutoGraph converts can call the function.
    """
    wrap = tf.autograph.experimental.do_not_convert if traced else lambda function: function
    table.replace(
        [FOUND],
        [Replacement(row(key), stand_in, applies, wrap) for key, stand_in in stand_ins.items()],
    )


Strategy = named("distribute_lib.Strategy")
StrategyExtended = named("distribute_lib.StrategyExtendedV2")
ReplicaContext = named("distribute_lib.ReplicaContext")
CurrentDistributionContext = named("distribute_lib._CurrentDistributionContext")
CollectiveAllReduceExtended: Any = named(
    "collective_all_reduce_strategy.CollectiveAllReduceExtended"
)
CollectiveAllReduce: Any = named("cross_device_ops.CollectiveAllReduce")
CrossDeviceOps = named("cross_device_ops.CrossDeviceOps")
CollectiveKeys = named("cross_device_utils.CollectiveKeys")
CheckpointInitialValue = named("base.CheckpointInitialValue")
DistributedValues = named("values.DistributedValues")
DistributedVariable = named("values.DistributedVariable")
Mirrored = named("values.Mirrored")
DatasetsFromFunction = named("input_lib.DistributedDatasetsFromFunction")
EagerTensor = named("ops.EagerTensor")
FuncGraph = named("func_graph.FuncGraph")
Branch = named("control_flow_v2_func_graphs.CondBranchFuncGraph")
ControlFlow = named("control_flow_v2_func_graphs.ControlFlowFuncGraph")
#: Class of the objects that `tf.function` returns.
Function = named("polymorphic_function.Function")
ConcreteFunction = named("concrete_function.ConcreteFunction")
ResourceVariable = named("resource_variable_ops.ResourceVariable")
#: Base class of datasets with elements of the same structure as their input.
UnchangedDataset: Any = named("dataset_ops.UnaryUnchangedStructureDataset")
VariantDataset = named("dataset_ops._VariantDataset")
#: Modules whose functions make all datasets.
DATASET_OPS = named("ops.gen_dataset_ops"), named("ops.gen_experimental_dataset_ops")
dataset_cardinality = named("gen_dataset_ops.dataset_cardinality")

#: Decorator of a rule that turns an op of a loop body into one op for all iterations.
RegisterPFor = named("pfor.RegisterPFor")
#: Wraps a tensor of such a body with a flag: whether its first dimension is that of iterations.
stacked_or_not = named("pfor.wrap")
create_vectorised = named("pfor._create_op")

#: Rules for the tangents of ops, by op name.
TANGENTS = named("forwardprop._SPECIAL_CASES")

select_replica = named("distribute_utils.select_replica")
regroup = named("distribute_utils.regroup")
canonical_device = named("device_util.canonicalize")
host_of = named("device_util.get_host_for_device")
context = named("context.context")
eager_mode = named("context.eager_mode")
get_function_def = named("context.get_function_def")
#: The whole module, because TensorFlow replaces functions of it.
execute = named("eager.execute")
host_input_device = named("numpy_dataset.SingleDevice")
id_in_cluster = named("multi_worker_util.id_in_cluster")
normalize_cluster_spec = named("multi_worker_util.normalize_cluster_spec")
cond_v2 = named("cond_v2.cond_v2")
#: Graph classes for the gradients of conditionals and loops.
CONTROL_FLOW_GRADIENTS = (
    named("cond_v2._CondGradFuncGraph"),
    named("while_v2._WhileBodyGradFuncGraph"),
)
graph_stack = named("ops._default_graph_stack")
get_op_def = named("op_def_registry.get")
add_op = named("op_def_library._apply_op_helper")
op_is_stateful = named("auto_control_deps.op_is_stateful")
resource_inputs = named("auto_control_deps._get_resource_inputs")


def orders_side_effects(graph: tf.Graph) -> bool:
    """Returns whether automatic control dependencies keep the order of ops in this graph."""
    return bool(graph._add_control_dependencies)


def is_branch(graph: tf.Graph) -> bool:
    """Returns whether the graph is a branch of a conditional."""
    return isinstance(graph, Branch)


def in_control_flow_of_version_1(graph: tf.Graph) -> bool:
    """Returns whether TensorFlow 1 control flow, or a TensorFlow 1 function, is being built."""
    return graph.building_function or graph._get_control_flow_context() is not None


def end_after(graph: tf.Graph, op: tf.Operation) -> None:
    """Makes the function of this graph end only after this op has run."""
    graph.control_outputs.append(op)


def outside_control() -> contextlib.AbstractContextManager[None]:
    """Clears control dependencies and control flow contexts for ops that are made in the block."""
    context: contextlib.AbstractContextManager[None] = tf.control_dependencies(None)
    return context


def is_control_flow(graph: tf.Graph) -> bool:
    """Returns whether the graph is a branch of a conditional, or the body of a loop."""
    return isinstance(graph, ControlFlow)


def can_take(tensor: tf.Tensor) -> bool:
    """Returns whether ops in the current graph can take this tensor of it or of an outer graph.

    Across a `tf.function` they cannot: another graph can call the function without a new trace.
    """
    if isinstance(tensor, EagerTensor):
        return bool(tf.executing_eagerly())
    graph = tf.compat.v1.get_default_graph()
    while graph is not tensor.graph:
        if not is_control_flow(graph):
            return False
        graph = graph.outer_graph
    return True


def spec_of_replica(element_spec: Any) -> Any:
    """Returns the spec of the first local replica's part of a distributed dataset's elements."""
    return tf.nest.map_structure(
        lambda spec: spec._value_specs[0] if hasattr(spec, "_value_specs") else spec, element_spec
    )


def is_undivided(distributed: Any) -> bool:
    """Returns whether each process takes all batches of its own dataset.

    It does with `AutoShardPolicy.OFF`, and with `distribute_datasets_from_function`.
    """
    if isinstance(distributed, DatasetsFromFunction):
        return True
    (part, *_) = getattr(distributed, "_cloned_datasets", None) or [None]
    if not isinstance(part, tf.data.Dataset):
        return False
    policy = part.options().experimental_distribute.auto_shard_policy
    return bool(policy == tf.data.experimental.AutoShardPolicy.OFF)


def let_batches_differ(distributed: Any) -> None:
    """Makes iterators over an endless dataset check for each batch which processes have one.

    Other iterators do so anyway. Without it, an iterator over an endless dataset assumes that all
    processes have batches of its own fixed size.
    """
    distributed._enable_get_next_as_optional = True
    distributed._cardinality = tf.data.UNKNOWN_CARDINALITY


def let_batches_be_equal(distributed: Any) -> None:
    """Makes iterators over a dataset assume that all processes have batches of its fixed size."""
    distributed._enable_get_next_as_optional = False


def graph_of(dataset: tf.data.Dataset) -> Any:
    """Returns the `GraphDef` of a dataset: nodes for the dataset's ops, a library of functions."""
    # Policy 1 (IGNORE): external state, such as that of resources, does not matter here.
    serialized = tf.raw_ops.DatasetToGraphV2(
        input_dataset=variant_of(dataset), external_state_policy=1
    )
    return tf.compat.v1.GraphDef.FromString(serialized.numpy())


def ops_in(definition: Any) -> set[str]:
    """Returns the types of all ops of a `GraphDef` and of its functions."""
    functions = (node for function in definition.library.function for node in function.node_def)
    return {node.op for node in itertools.chain(definition.node, functions)}


#: Types of ops that call Python.
PYTHON_OPS = frozenset(("PyFunc", "PyFuncStateless", "EagerPyFunc"))


def plain_variable(
    value: float,
    name: str,
    dtype: tf.DType = tf.float32,
    shape: tf.TensorShape | tuple[int, ...] = (),
    device: str = "/device:CPU:0",
) -> tf.Variable:
    """Makes a variable filled with `value`, outside every graph, strategy and scope."""
    with tf.init_scope(), tf.device(device), tf.name_scope("gradring/"):
        return ResourceVariable(
            tf.fill(shape, tf.constant(value, dtype)), trainable=False, dtype=dtype, name=name
        )


def variant_of(dataset: tf.data.Dataset) -> tf.Tensor:
    """Returns the variant tensor that represents a dataset."""
    return dataset._variant_tensor


def inputs_of(dataset: tf.data.Dataset) -> Sequence[tf.data.Dataset]:
    """Returns the datasets that this dataset reads from, or the one that it wraps.

    Readers of files wrap a dataset, with the same variant.
    """
    wrapped = getattr(dataset, "_impl", None)
    return [wrapped] if isinstance(wrapped, tf.data.Dataset) else dataset._inputs()


def functions_of(dataset: tf.data.Dataset) -> Sequence[Any]:
    """Returns the wrappers of the functions of a dataset's own op.

    Attribute `function` of each is a `ConcreteFunction`.
    """
    return dataset._functions()  # type: ignore[no-any-return]


def shuffles(dataset: tf.data.Dataset) -> bool:
    """Returns whether a dataset's own op shuffles."""
    return hasattr(dataset, "_seed2")


def tensors_of(dataset: tf.data.Dataset) -> Sequence[tf.Tensor]:
    """Returns the flat list of arguments of `from_tensors` or `from_tensor_slices`."""
    return dataset._tensors  # type: ignore[no-any-return]


def structure_of(dataset: tf.data.Dataset) -> dict[str, Any]:
    """Returns the shapes and dtypes of a dataset's elements, as keyword arguments of ops."""
    return dataset._flat_structure  # type: ignore[no-any-return]


def variant_dataset(variant: tf.Tensor, element_spec: Any) -> tf.data.Dataset:
    """Returns the `tf.data.Dataset` that a variant tensor represents."""
    return VariantDataset(variant, element_spec)


def has_one_element(variant: tf.Tensor | None) -> bool:
    """Returns whether a dataset, given as its variant or None, is known to have one element."""
    return variant is not None and int(dataset_cardinality(variant)) == 1


def is_function(value: Any) -> bool:
    """Returns whether the value is a traced function, as ops of datasets take them."""
    return isinstance(value, ConcreteFunction)


def gate(tensor: tf.Tensor, handle: tf.Tensor) -> tf.Tensor:
    """Adds a gate, which passes the tensor on once the Start of this handle has run.

    No gradient tape records the gate.
    """
    with tf.device("/device:CPU:0"), tf.control_dependencies(None):
        *_, (passed,) = add_op("GradringGate", tensor=tensor, handle=handle)
    return passed


def replace_input(op: tf.Operation, index: int, tensor: tf.Tensor) -> None:
    """Replaces one input of `op` by a tensor of equal shape and dtype, while its graph is built."""
    op._update_input(index, tensor)


def called_graphs(op: tf.Operation) -> list[tf.Graph]:
    """Returns the graphs of the functions that an operation calls; in one order on all ranks."""
    return graphs_in(op.graph, op.node_def.attr)


def graphs_in(graph: tf.Graph, attrs: Mapping[str, Any]) -> list[tf.Graph]:
    """Returns the graphs of the functions that the attributes of an operation name."""
    values = [attrs[name] for name in sorted(attrs)]
    calls = [call for attr in values for call in (attr.func, *attr.list.func)]
    called = [graph._get_function(call.name) for call in calls if call.name]
    return [function.graph for function in called if hasattr(function, "graph")]


def inside_called_graphs(op: tf.Operation, tensor: tf.Tensor) -> list[tf.Tensor]:
    """Returns the placeholder of `tensor`, an input of the operation, in each graph it calls.

    Calls of a `tf.function`, conditionals and loops call graphs; other operations call none.
    """
    # Counted from the end: the first input of a conditional, its predicate, is not a branch's.
    place = [taken.name for taken in op.inputs].index(tensor.name) - len(op.inputs)
    return [graph.inputs[place] for graph in called_graphs(op)]


def run_op(
    op: str,
    inputs: dict[str, tf.Tensor | list[tf.Tensor]],
    attrs: dict[str, str | int],
    output_count: int,
    *,
    dtype: tf.DType | None = None,
    lengths: Mapping[str, str] = MappingProxyType({}),
    types: Mapping[str, str] = MappingProxyType({}),
    unseen: bool = False,
) -> list[tf.Tensor]:
    """Runs an op at once when executing eagerly, or else adds it to the graph.

    Args:
        op: Registered name of the op.
        inputs: A tensor, or a list of tensors, for each input, in the op's order.
        attrs: Value of each attribute that the inputs do not imply.
        output_count: Number of output tensors.
        dtype: Value of the op's type attribute `T`, if it has one.
        lengths: By input that is a list of one type, the attribute of its length; by default `N`.
        types: By input that is a list of several types, the attribute of these.
        unseen: Whether to hide the op's outputs from `tf.debugging`.

    Returns:
        The flat list of output tensors.
    """
    # A name that contains a file's name is not always valid UTF-8.
    values: dict[str, Any] = {
        name: value.encode(errors="backslashreplace") if isinstance(value, str) else value
        for name, value in attrs.items()
    }
    flat: list[Any] = []
    named: dict[str, Any] = {} if dtype is None else {"T": dtype.as_datatype_enum}
    for name, value in inputs.items():
        if isinstance(value, list):
            if name in types:
                named[types[name]] = [each.dtype.as_datatype_enum for each in value]
            else:
                named[lengths.get(name, "N")] = len(value)
            flat.extend(value)
        else:
            flat.append(value)
    encoded: list[Any] = []
    for name, value in (named | values).items():
        encoded += [name, value]
    ctx = context()
    if tf.executing_eagerly():
        run = execute.quick_execute if unseen else execute.execute
        results = run(op.encode(), output_count, inputs=flat, attrs=tuple(encoded), ctx=ctx)
    else:
        before = ctx.invoking_op_callbacks
        ctx.invoking_op_callbacks = before or unseen
        try:
            *_, results = add_op(op, **inputs, **values)
        finally:
            ctx.invoking_op_callbacks = before
    if execute.must_record_gradient():
        execute.record_gradient(op, flat, tuple(encoded), results)
    return list(results)
