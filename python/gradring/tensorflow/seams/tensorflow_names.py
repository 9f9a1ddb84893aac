"""Table of all private names of TensorFlow that gradring uses, replaces or assigns.

`compat` looks up the whole table when gradring is imported, before anything is replaced. Overrides
of private methods are listed at their classes instead, by `table.overrides`.
"""

from __future__ import annotations

from collections.abc import Iterator

from gradring.tensorflow.seams.table import Seam

_DATA = "tensorflow.python.data.ops"
_DISTRIBUTE = "tensorflow.python.distribute"
_EAGER = "tensorflow.python.eager"
_FRAMEWORK = "tensorflow.python.framework"
_OPS = "tensorflow.python.ops"

_EXTENDED = f"{_DISTRIBUTE}.collective_all_reduce_strategy:CollectiveAllReduceExtended"
_ITERATORS = f"{_DISTRIBUTE}.input_lib:DistributedIteratorBase"
_DATASETS = f"{_DISTRIBUTE}.input_lib:DistributedDataset"
_MULTI_DEVICE = f"{_DATA}.multi_device_iterator_ops:OwnedMultiDeviceIterator"
_DATASET = f"{_DATA}.dataset_ops:DatasetV2"
_SHUFFLE = f"{_DATA}.shuffle_op:_ShuffleDataset"
_GRAPH = f"{_FRAMEWORK}.ops:Graph"
_CONTEXT = f"{_EAGER}.context:Context"
_FUNCTIONS = f"{_EAGER}.polymorphic_function"
_ERROR = f"{_FRAMEWORK}.errors_impl:OpError"

_NOT_VECTORISED = "tf.vectorized_map, tape.jacobian and tape.batch_jacobian take no collectives"
_NOT_MEASURED = "gradring.Monitor does not measure how long a step waits for its batch"
_NOT_WHOLE = (
    "a process that is killed while it saves may leave a part of a checkpoint or SavedModel"
)
_NOT_EXPLAINED = "a gradient that TensorFlow cannot trace through a loop fails with its own error"
_SAME_DRAWS = "random operations of TensorFlow that have a seed draw the same on all ranks"
_NOT_ORDERED = "gradients are sent in the order of variables, so less communication is hidden"


def _attributes(owner: str, names: str, does: str) -> Iterator[Seam]:
    for name in names.split():
        yield Seam(owner, name, does, is_attribute=True)


TABLE: tuple[Seam, ...] = (
    # Strategies.
    Seam(f"{_DISTRIBUTE}.distribute_lib", "Strategy", "constructs our strategy", "extended"),
    Seam(f"{_DISTRIBUTE}.distribute_lib", "StrategyExtendedV2", "joins replicas of one process"),
    Seam(
        f"{_DISTRIBUTE}.distribute_lib",
        "ReplicaContext",
        "is the scope of the replica in `strategy.run`",
        "strategy replica_id_in_sync_group",
    ),
    Seam(
        f"{_DISTRIBUTE}.distribute_lib:ReplicaContext",
        "all_reduce",
        "reduces the values of an empty batch, in steps of Keras",
        "reduce_op value",
    ),
    Seam(
        f"{_DISTRIBUTE}.distribute_lib",
        "_CurrentDistributionContext",
        "is the scope of a strategy whose variables are TensorFlow's own",
        "strategy var_creator_scope",
    ),
    Seam(
        "tensorflow:GradientTape",
        "gradient",
        "reduces gradients of a program that knows of no replicas",
        "target sources output_gradients unconnected_gradients",
    ),
    Seam(
        f"{_FRAMEWORK}.random_seed",
        "get_seed",
        "has random operations of each replica draw their own numbers",
        "op_seed",
        without=_SAME_DRAWS,
    ),
    Seam(
        f"{_OPS}.stateful_random_ops:Generator",
        "_preprocess_key",
        "has a generator that was made outside of the scope draw each replica's own numbers",
        "key",
        without=_SAME_DRAWS,
    ),
    Seam(
        f"{_DISTRIBUTE}.collective_all_reduce_strategy",
        "CollectiveAllReduceExtended",
        "is the base class of our strategy's implementation",
        "container_strategy cluster_resolver communication_options",
    ),
    *_attributes(
        _EXTENDED,
        "_local_device_type _num_devices_per_worker _worker_device _host_input_device"
        " _collective_keys _cross_device_ops _host_cross_device_ops _default_device _cluster_spec"
        " _cluster_resolver _task_type _task_id _num_workers _id_in_cluster _is_chief _rpc_layer",
        "is assigned: this process's place and devices",
    ),
    Seam(_EXTENDED, "_initialize_single_worker", "places variables on local devices", "devices"),
    Seam(_EXTENDED, "_container_strategy", "is the strategy of an implementation", ""),
    Seam(f"{_DISTRIBUTE}.cross_device_ops", "CrossDeviceOps", "constructs our operations", ""),
    Seam(
        f"{_DISTRIBUTE}.cross_device_ops",
        "CollectiveAllReduce",
        "is the base class of our cross-device operations",
    ),
    *_attributes(
        f"{_DISTRIBUTE}.cross_device_ops:CollectiveAllReduce",
        "_devices _group_size _options _lock _launchers _canonicalize_devices",
        "is assigned: devices and number of replicas",
    ),
    Seam(f"{_DISTRIBUTE}.cross_device_utils", "CollectiveKeys", "is assigned, and not used"),
    Seam(f"{_DISTRIBUTE}.device_util", "canonicalize", "compares names of devices", "d"),
    Seam(f"{_DISTRIBUTE}.device_util", "get_host_for_device", "reduces on the host", "device"),
    Seam(
        f"{_DISTRIBUTE}.distribute_utils",
        "select_replica",
        "takes this replica's arguments",
        "replica_id structured",
    ),
    Seam(
        f"{_DISTRIBUTE}.distribute_utils",
        "regroup",
        "makes one value of those on local devices",
        "values wrap_class",
    ),
    Seam(
        f"{_DISTRIBUTE}.multi_worker_util",
        "id_in_cluster",
        "is the rank of a task",
        "cluster_spec task_type task_id",
    ),
    Seam(
        f"{_DISTRIBUTE}.multi_worker_util",
        "normalize_cluster_spec",
        "reads the cluster of a resolver",
        "cluster_spec",
    ),
    Seam(f"{_DISTRIBUTE}.numpy_dataset", "SingleDevice", "puts arrays on the host", "device"),
    Seam(f"{_DISTRIBUTE}.values", "DistributedValues", "tells values of replicas from tensors"),
    Seam(f"{_DISTRIBUTE}.values", "DistributedVariable", "is given `int` and `float`"),
    Seam(f"{_DISTRIBUTE}.values", "Mirrored", "is the same value on local devices"),
    Seam(
        f"{_DISTRIBUTE}.values:MirroredVariable",
        "_update_replica",
        "is replaced: notes variables that a replica assigns by itself, and reduces plain numbers",
        "update_fn value",
    ),
    Seam(
        f"{_DISTRIBUTE}.values:PerReplicaSpec",
        "_value_specs",
        "is what one replica gets of a batch",
        is_attribute=True,
    ),
    Seam(
        "tensorflow.python.trackable.base",
        "CheckpointInitialValue",
        "is an initial value that a checkpoint has",
    ),
    # Batches of distributed datasets.
    Seam(
        f"{_DISTRIBUTE}.input_lib",
        "_calculate_replicas_with_values",
        "is replaced: counts replicas that have a batch, and their samples",
        "strategy input_workers optional_list",
    ),
    Seam(
        f"{_DISTRIBUTE}.input_lib",
        "_dummy_tensor_fn",
        "is replaced: a rank without samples of a batch has None where others have it",
        "value_structure",
    ),
    Seam(_ITERATORS, "get_next", "is replaced: counts samples", "name"),
    Seam(_ITERATORS, "get_next_as_optional", "is replaced: counts samples", ""),
    *_attributes(
        _ITERATORS,
        "_strategy _cardinality _enable_get_next_as_optional",
        "decides who counts samples",
    ),
    *_attributes(
        _DATASETS,
        "_cardinality _enable_get_next_as_optional",
        "is assigned: sizes of batches may differ between ranks",
    ),
    Seam(_DATASETS, "_cloned_datasets", "has options for sharding", is_attribute=True),
    Seam(
        f"{_DISTRIBUTE}.input_lib",
        "DistributedDatasetsFromFunction",
        "is a dataset that is not divided among ranks",
    ),
    Seam(
        f"{_DISTRIBUTE}.input_lib:_SingleWorkerDatasetIteratorBase",
        "get_next_as_list",
        "is replaced: measures the wait for input",
        without=_NOT_MEASURED,
    ),
    Seam(
        f"{_DISTRIBUTE}.input_lib:_SingleWorkerDatasetIteratorBase",
        "get_next_as_optional_list",
        "is replaced: measures the wait for input",
        without=_NOT_MEASURED,
    ),
    # Datasets and their iterators.
    Seam(_DATASET, "_variant_tensor", "is the dataset as a tensor"),
    Seam(_DATASET, "_inputs", "walks through a pipeline", ""),
    Seam(_DATASET, "_functions", "finds Python code in a pipeline", ""),
    Seam(_DATASET, "_flat_structure", "has arguments of ops that make iterators"),
    Seam(
        f"{_DATA}.dataset_ops",
        "_VariantDataset",
        "is the dataset of a tensor",
        "dataset_variant element_spec",
    ),
    Seam(
        f"{_DATA}.dataset_ops",
        "UnaryUnchangedStructureDataset",
        "keeps a dataset as long as its iterators",
        "input_dataset variant_tensor",
    ),
    *_attributes(f"{_DATA}.from_tensors_op:_TensorDataset", "_tensors", "has data in memory"),
    *_attributes(
        f"{_DATA}.from_tensor_slices_op:_TensorSliceDataset", "_tensors", "has data in memory"
    ),
    *_attributes(_SHUFFLE, "_seed2", "tells datasets that shuffle"),
    *(
        Seam(f"{_DATA}.readers:{reader}V2", "_impl", "is a reader's dataset", is_attribute=True)
        for reader in ("FixedLengthRecordDataset", "TextLineDataset", "TFRecordDataset")
    ),
    Seam(
        f"{_DATA}.structured_function:StructuredFunctionWrapper",
        "function",
        "is a function of a dataset",
    ),
    Seam(
        f"{_DATA}.iterator_ops:OwnedIterator",
        "__init__",
        "is replaced: leaving an iterator does not wait for its thread",
    ),
    Seam(
        _MULTI_DEVICE,
        "__init__",
        "is replaced: an iterator may be left before its end",
        "dataset devices max_buffer_size prefetch_buffer_size source_device",
    ),
    *_attributes(
        _MULTI_DEVICE,
        "_element_spec _devices _source_device _multi_device_iterator_resource _device_iterators",
        "is assigned: a plain iterator for one processor",
    ),
    Seam(_OPS, "gen_dataset_ops", "is replaced: datasets remember how they are made"),
    Seam(_OPS, "gen_experimental_dataset_ops", "is replaced: datasets remember how they are made"),
    Seam(
        f"{_OPS}.gen_dataset_ops",
        "dataset_cardinality",
        "finds functions that run once an epoch",
        "input_dataset",
    ),
    # Graphs and functions.
    Seam(f"{_FRAMEWORK}.ops", "EagerTensor", "tells eager tensors from those of graphs"),
    Seam(
        f"{_FRAMEWORK}.ops",
        "_default_graph_stack",
        "has graphs that are being built",
        without=_NOT_EXPLAINED,
    ),
    Seam(
        f"{_FRAMEWORK}.ops",
        "device",
        "is replaced: names of parameter servers in `tf.device`",
        "device_name_or_function",
    ),
    Seam(
        f"{_FRAMEWORK}.ops:Operation",
        "_update_input",
        "adds gates to a backward pass",
        "index tensor",
        without=_NOT_ORDERED,
    ),
    *_attributes(_GRAPH, "_add_control_dependencies", "tells graphs that order side effects"),
    Seam(_GRAPH, "_get_control_flow_context", "finds conditionals of version 1", ""),
    Seam(_GRAPH, "_get_function", "finds the graph of a function that is called", "name"),
    Seam(
        _GRAPH,
        "_create_op_internal",
        "is replaced in graphs for sessions: orders functions with collectives",
        "op_type inputs dtypes input_types name attrs",
    ),
    Seam(f"{_FRAMEWORK}.func_graph", "FuncGraph", "tells functions' graphs from others"),
    Seam(
        f"{_FRAMEWORK}.func_graph:FuncGraph",
        "capture",
        "is replaced in branches and bodies: they order collectives by one tensor",
        "tensor name",
    ),
    Seam(
        f"{_OPS}.control_flow_v2_func_graphs",
        "CondBranchFuncGraph",
        "is a branch of a conditional",
    ),
    Seam(
        f"{_OPS}.control_flow_v2_func_graphs",
        "ControlFlowFuncGraph",
        "is a branch of a conditional or the body of a loop",
    ),
    Seam(f"{_OPS}.cond_v2", "cond_v2", "is `tf.cond` in any graph", "pred true_fn false_fn"),
    Seam(
        f"{_OPS}.cond_v2",
        "_CondGradFuncGraph",
        "is a conditional's gradient",
        without=_NOT_EXPLAINED,
    ),
    Seam(
        f"{_OPS}.while_v2",
        "_WhileBodyGradFuncGraph",
        "is a loop's gradient",
        without=_NOT_EXPLAINED,
    ),
    Seam(f"{_FUNCTIONS}.polymorphic_function", "Function", "is what `tf.function` makes"),
    Seam(
        f"{_FUNCTIONS}.polymorphic_function:Function",
        "__call__",
        "is replaced: a graph that TensorFlow refuses is traced without the order of gradients",
        without=_NOT_ORDERED,
    ),
    Seam(f"{_FUNCTIONS}.concrete_function", "ConcreteFunction", "is a traced function"),
    Seam(
        f"{_FUNCTIONS}.function_context",
        "make_function_context",
        "is replaced: functions are traced again for another place in the group",
        "scope_type",
    ),
    Seam(
        "tensorflow.core.function.polymorphism.function_cache",
        "FunctionContext",
        "is what a trace is kept by",
        "context scope_type",
    ),
    Seam(
        f"{_FRAMEWORK}.auto_control_deps",
        "_get_resource_inputs",
        "finds what orders operations",
        "op",
        without=_NOT_ORDERED,
    ),
    Seam(
        f"{_FRAMEWORK}.auto_control_deps",
        "op_is_stateful",
        "finds what orders operations",
        "op",
        without=_NOT_ORDERED,
    ),
    Seam(f"{_FRAMEWORK}.op_def_registry", "get", "finds arguments of an op", "name"),
    Seam(
        f"{_FRAMEWORK}.op_def_library",
        "_apply_op_helper",
        "adds our ops to graphs",
        "op_type_name name",
    ),
    Seam(f"{_OPS}.resource_variable_ops", "ResourceVariable", "is a variable of no strategy"),
    # Ops that are executed.
    Seam(_EAGER, "execute", "executes our ops"),
    Seam(
        f"{_EAGER}.execute", "execute", "executes our ops", "op_name num_outputs inputs attrs ctx"
    ),
    Seam(
        f"{_EAGER}.execute",
        "quick_execute",
        "executes our ops, unseen by `tf.debugging`",
        "op_name num_outputs inputs attrs ctx",
    ),
    Seam(f"{_EAGER}.execute", "must_record_gradient", "asks for a tape", ""),
    Seam(f"{_EAGER}.execute", "record_gradient", "tells tapes of our ops"),
    Seam(f"{_EAGER}.context", "context", "is the eager context", ""),
    Seam(f"{_EAGER}.context", "eager_mode", "leaves a graph", ""),
    Seam(f"{_EAGER}.context", "get_function_def", "reads a dataset's function", "name"),
    Seam(_CONTEXT, "add_function_def", "adds a dataset's function with other seeds", "fdef"),
    Seam(_CONTEXT, "remove_function", "removes it", "name"),
    Seam(_CONTEXT, "invoking_op_callbacks", "hides our ops from `tf.debugging`"),
    # Derivatives and vectorised loops.
    Seam(f"{_EAGER}.forwardprop", "_SPECIAL_CASES", "has tangents of our ops"),
    Seam(
        f"{_OPS}.parallel_for.pfor",
        "RegisterPFor",
        "vectorises our ops",
        "op_type",
        without=_NOT_VECTORISED,
    ),
    Seam(
        f"{_OPS}.parallel_for.pfor",
        "wrap",
        "vectorises our ops",
        "tensor is_stacked",
        without=_NOT_VECTORISED,
    ),
    Seam(
        f"{_OPS}.parallel_for.pfor",
        "_create_op",
        "vectorises our ops",
        "op_type inputs op_dtypes attrs",
        without=_NOT_VECTORISED,
    ),
    # Sessions of TensorFlow 1.
    Seam(
        "tensorflow.python.client.session:BaseSession",
        "_do_run",
        "is replaced: orders collectives of a graph",
        "handle target_list fetch_list feed_dict options run_metadata",
    ),
    Seam(
        "tensorflow.python.client.session:BaseSession",
        "make_callable",
        "is replaced: orders collectives of a graph",
        "fetches feed_list accept_options",
    ),
    Seam(
        "tensorflow.python.client.session:BaseSession",
        "_make_callable_from_options",
        "is replaced: orders collectives of a graph",
        "callable_options",
    ),
    Seam(
        "tensorflow.python.training.monitored_session",
        "_PREEMPTION_ERRORS",
        "is assigned: a lost rank ends a MonitoredSession",
        without="a MonitoredSession that has lost a rank makes sessions again and again",
    ),
    # Files and errors.
    Seam(
        "tensorflow.python.saved_model.save",
        "save_and_return_nodes",
        "is replaced: a SavedModel is whole or not there",
        "obj export_dir",
        without=_NOT_WHOLE,
    ),
    Seam(
        "tensorflow.python.checkpoint.checkpoint:TrackableSaver",
        "save",
        "is replaced: a checkpoint is whole or not there",
        "file_prefix",
        without=_NOT_WHOLE,
    ),
    Seam(
        "tensorflow.python.checkpoint.checkpoint:Checkpoint",
        "read",
        "is replaced: update rules drop gradients of the weights before",
        "save_path",
        without="update rules apply gradients from before a checkpoint was read",
    ),
    Seam(
        _ERROR,
        "__init__",
        "has the message of a failed collective",
        "node_def op message error_code",
    ),
    Seam(
        _ERROR,
        "_message",
        "is replaced in our errors: gradring's sentence comes first",
        is_attribute=True,
    ),
)
