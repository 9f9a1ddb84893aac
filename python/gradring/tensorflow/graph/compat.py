"""TensorFlow's private names, by those that gradring has for them; no other file uses any.

`seams/tensorflow_names.py` has them as a table. It is looked up here, before anything is replaced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from gradring.tensorflow.seams import table
from gradring.tensorflow.seams.table import Replacement, Seam, find
from gradring.tensorflow.seams.tensorflow_names import TABLE

FOUND = find("tensorflow", TABLE)
FOUND.check()

_ROWS = {seam.key: seam for seam in TABLE}


def row(key: str) -> Seam:
    """The row of the table with this key, such as ``Graph._get_function``."""
    return _ROWS[key]


def named(key: str) -> Any:
    """What TensorFlow has by the name of a row; None where gradring goes without it."""
    return FOUND.value(_ROWS[key])


def has(*keys: str) -> bool:
    """Whether TensorFlow has all of these rows without which gradring would go on."""
    return all(row(key) in FOUND.owners for key in keys)


def replace(
    stand_ins: Mapping[str, Callable[..., Any]],
    *,
    applies: Callable[..., bool] = lambda *_: True,
    traced: bool = False,
) -> None:
    """Puts stand-ins in the place of functions of TensorFlow: all or none.

    Args:
        stand_ins: By the key of a row, what gets the original and then its arguments.
        applies: Takes the first argument; where it returns False, the original runs.
        traced: Code that AutoGraph converts may call it.
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
#: What `tf.function` makes.
Function = named("polymorphic_function.Function")
ConcreteFunction = named("concrete_function.ConcreteFunction")
ResourceVariable = named("resource_variable_ops.ResourceVariable")
#: Base of datasets that have the elements of another.
UnchangedDataset: Any = named("dataset_ops.UnaryUnchangedStructureDataset")
VariantDataset = named("dataset_ops._VariantDataset")
#: Every dataset is made by a function of one of these modules.
DATASET_OPS = named("ops.gen_dataset_ops"), named("ops.gen_experimental_dataset_ops")
dataset_cardinality = named("gen_dataset_ops.dataset_cardinality")

#: Says how an op of a loop body becomes one op for all iterations, as `tf.vectorized_map` asks.
RegisterPFor = named("pfor.RegisterPFor")
#: A tensor of such a body, and whether it is stacked: has a first dimension for the iterations.
stacked_or_not = named("pfor.wrap")
create_vectorised = named("pfor._create_op")

#: The tangents of ops, by name.
TANGENTS = named("forwardprop._SPECIAL_CASES")

select_replica = named("distribute_utils.select_replica")
regroup = named("distribute_utils.regroup")
canonical_device = named("device_util.canonicalize")
host_of = named("device_util.get_host_for_device")
context = named("context.context")
eager_mode = named("context.eager_mode")
get_function_def = named("context.get_function_def")
#: The module: TensorFlow replaces functions of it.
execute = named("eager.execute")
host_input_device = named("numpy_dataset.SingleDevice")
id_in_cluster = named("multi_worker_util.id_in_cluster")
normalize_cluster_spec = named("multi_worker_util.normalize_cluster_spec")
cond_v2 = named("cond_v2.cond_v2")
#: Gradients of conditionals and loops, and graphs that are being built.
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
    """Whether ops of a function's graph keep their order, by automatic control dependencies."""
    return bool(graph._add_control_dependencies)


def is_branch(graph: tf.Graph) -> bool:
    """Whether it is a branch of a conditional."""
    return isinstance(graph, Branch)


def in_control_flow_of_version_1(graph: tf.Graph) -> bool:
    """Whether a conditional or loop of the old kind is being built, or a function of that kind."""
    return graph.building_function or graph._get_control_flow_context() is not None


def end_after(graph: tf.Graph, op: tf.Operation) -> None:
    """What waits for the function of this graph waits for this op of it, too."""
    graph.control_outputs.append(op)


def outside_control() -> contextlib.AbstractContextManager[None]:
    """Inside, ops get no control dependencies, and are in no conditional or loop."""
    context: contextlib.AbstractContextManager[None] = tf.control_dependencies(None)
    return context


def is_control_flow(graph: tf.Graph) -> bool:
    """Whether it is a branch of a conditional, or the body of a loop."""
    return isinstance(graph, ControlFlow)


def can_take(tensor: tf.Tensor) -> bool:
    """Whether what is being built may take the tensor of this graph or of one around it.

    A `tf.function` in between must not: it may be called from another graph without being traced.
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
    """What the first local replica gets of an element of a distributed dataset."""
    return tf.nest.map_structure(
        lambda spec: spec._value_specs[0] if hasattr(spec, "_value_specs") else spec, element_spec
    )


def is_undivided(distributed: Any) -> bool:
    """Whether each process takes all batches of its own dataset.

    It does by `AutoShardPolicy.OFF`, and of what `distribute_datasets_from_function` has made.
    """
    if isinstance(distributed, DatasetsFromFunction):
        return True
    (part, *_) = getattr(distributed, "_cloned_datasets", None) or [None]
    if not isinstance(part, tf.data.Dataset):
        return False
    policy = part.options().experimental_distribute.auto_shard_policy
    return bool(policy == tf.data.experimental.AutoShardPolicy.OFF)


def let_batches_differ(distributed: Any) -> None:
    """Has iterators over an endless dataset ask all processes for each batch, as over others.

    Otherwise they take sizes that are fixed for those of all processes.
    """
    distributed._enable_get_next_as_optional = True
    distributed._cardinality = tf.data.UNKNOWN_CARDINALITY


def let_batches_be_equal(distributed: Any) -> None:
    """Has iterators over a dataset believe that all processes have batches of its fixed size."""
    distributed._enable_get_next_as_optional = False


def graph_of(dataset: tf.data.Dataset) -> Any:
    """What a dataset does, as a `GraphDef`; its own ops, beside those of functions."""
    # 1: what is to happen to resources does not matter here.
    serialized = tf.raw_ops.DatasetToGraphV2(
        input_dataset=variant_of(dataset), external_state_policy=1
    )
    return tf.compat.v1.GraphDef.FromString(serialized.numpy())


def plain_variable(
    value: float,
    name: str,
    dtype: tf.DType = tf.float32,
    shape: tf.TensorShape | tuple[int, ...] = (),
    device: str = "/device:CPU:0",
) -> tf.Variable:
    """A variable full of `value`, outside every graph, strategy and distribution scope."""
    with tf.init_scope(), tf.device(device), tf.name_scope("gradring/"):
        return ResourceVariable(
            tf.fill(shape, tf.constant(value, dtype)), trainable=False, dtype=dtype, name=name
        )


def variant_of(dataset: tf.data.Dataset) -> tf.Tensor:
    """A dataset as a tensor."""
    return dataset._variant_tensor


def inputs_of(dataset: tf.data.Dataset) -> Sequence[tf.data.Dataset]:
    """The datasets that one is made of."""
    return dataset._inputs()  # type: ignore[no-any-return]


def functions_of(dataset: tf.data.Dataset) -> Sequence[Any]:
    """The functions of a dataset's own op; each has a `ConcreteFunction` as its `function`."""
    return dataset._functions()  # type: ignore[no-any-return]


def shuffles(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset's own op shuffles."""
    return hasattr(dataset, "_seed2")


def tensors_of(dataset: tf.data.Dataset) -> Sequence[tf.Tensor]:
    """The tensors that `from_tensors` and `from_tensor_slices` were given, flat."""
    return dataset._tensors  # type: ignore[no-any-return]


def structure_of(dataset: tf.data.Dataset) -> dict[str, Any]:
    """The shapes and dtypes of elements, as arguments of ops."""
    return dataset._flat_structure  # type: ignore[no-any-return]


def variant_dataset(variant: tf.Tensor, element_spec: Any) -> tf.data.Dataset:
    """The `tf.data.Dataset` that a variant tensor stands for."""
    return VariantDataset(variant, element_spec)


def has_one_element(variant: tf.Tensor | None) -> bool:
    """Whether a dataset's variant, or None, is known to have one element."""
    return variant is not None and int(dataset_cardinality(variant)) == 1


def is_function(value: Any) -> bool:
    """Whether it is a traced function, such as a dataset's op takes."""
    return isinstance(value, ConcreteFunction)


def gate(tensor: tf.Tensor, handle: tf.Tensor) -> tf.Tensor:
    """The tensor, once the Start of this handle has run; no tape sees it."""
    with tf.device("/device:CPU:0"), tf.control_dependencies(None):
        *_, (passed,) = add_op("GradringGate", tensor=tensor, handle=handle)
    return passed


def replace_input(op: tf.Operation, index: int, tensor: tf.Tensor) -> None:
    """Lets `op`, of a graph that is still being built, take another tensor like the one it has."""
    op._update_input(index, tensor)


def called_graphs(op: tf.Operation) -> list[tf.Graph]:
    """The graphs of the functions that an operation calls; the same order on all ranks."""
    return graphs_in(op.graph, op.node_def.attr)


def graphs_in(graph: tf.Graph, attrs: Mapping[str, Any]) -> list[tf.Graph]:
    """The graphs of the functions that attributes of an operation name."""
    values = [attrs[name] for name in sorted(attrs)]
    calls = [call for attr in values for call in (attr.func, *attr.list.func)]
    called = [graph._get_function(call.name) for call in calls if call.name]
    return [function.graph for function in called if hasattr(function, "graph")]


def inside_called_graphs(op: tf.Operation, tensor: tf.Tensor) -> list[tf.Tensor]:
    """What `tensor`, an input of the operation, is in each graph that the operation calls.

    These are those of a `tf.function`, of branches, or of a loop; other operations call none.
    """
    # The first inputs of a conditional are none of its branches'.
    place = [taken.name for taken in op.inputs].index(tensor.name) - len(op.inputs)
    return [graph.inputs[place] for graph in called_graphs(op)]


def run_op(
    op: str,
    inputs: dict[str, tf.Tensor | list[tf.Tensor]],
    dtype: tf.DType,
    attrs: dict[str, str | int],
    output_count: int,
    *,
    unseen: bool = False,
) -> list[tf.Tensor]:
    """Runs an op at once when executing eagerly, or else adds it to the graph.

    Args:
        op: Registered name of the op.
        inputs: A tensor, or a list of tensors, for each input, in the op's order.
        dtype: The `tf.DType` that the op calls T.
        attrs: str or int for each attribute that the inputs do not imply.
        output_count: Number of output tensors.
        unseen: Keep `tf.debugging` from looking at what the op returns.

    Returns:
        The flat list of output tensors.
    """
    # A name that quotes that of a file may be no UTF-8.
    values: dict[str, Any] = {
        name: value.encode(errors="backslashreplace") if isinstance(value, str) else value
        for name, value in attrs.items()
    }
    flat: list[Any] = []
    named: dict[str, Any] = {"T": dtype.as_datatype_enum}
    for value in inputs.values():
        if isinstance(value, list):
            named["N"] = len(value)
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
