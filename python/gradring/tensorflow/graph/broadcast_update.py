"""Updates that one rank computes and every replica receives.

Every rank traces the function. The trace gives the structure, shapes and dtypes of the result, and
the variables that the function assigns, without executing anything. Only the chief then runs the
function; the other ranks pass placeholders to the broadcasts that follow.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from gradring.gradients.names import Names
from gradring.gradients.reduction import Collective
from gradring.group.communicator import Communicator
from gradring.group.steps import described
from gradring.tensorflow.graph import compat, replica_step
from gradring.tensorflow.graph.dtypes import as_native_bits
from gradring.tensorflow.graph.start_wait import start, wait

CHIEF = 0

LABEL = "broadcast_update"

#: Ops that only read the variable whose handle they take. Any other op counts as an assignment:
#: an op that is missing here costs a needless broadcast, but never makes replicas differ.
_READING_OPS = frozenset(
    {"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape", "VarIsInitializedOp"}
)

#: Attribute of calls, conditionals and loops: TensorFlow's list of inputs that are only read.
_READ_ONLY_ATTR = "_read_only_resource_inputs"


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def broadcast_update(
    fn: Callable[..., Any], args: Sequence[Any], communicator: Communicator
) -> Any:
    """Runs `fn(*args)` on the chief; see `CustomCollectiveStrategy.broadcast_update`."""
    if tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context():
        raise RuntimeError(
            f"{LABEL} was called inside strategy.run on rank {communicator.rank} of "
            f"{communicator.host}; call it beside strategy.run, where there is no replica yet"
        )
    with _aborting(communicator):
        tensors = [leaf for leaf in tf.nest.flatten(list(args)) if _is_tensor(leaf)]
        with replica_step.holding(is_broadcast=True):
            traced = _Traced(fn, args, tensors)
        results = traced.run(tensors) if communicator.rank == CHIEF else []
        if communicator.world_size > 1:
            results = _broadcast_results(traced, results, communicator)
            values = [tf.convert_to_tensor(variable) for variable in traced.assigned]
            names = Names.of_variables(f"{LABEL}/variables", values, traced.assigned)
            values = broadcast_tensors(values, names, communicator)
            for variable, value in zip(traced.assigned, values, strict=True):
                variable.assign(value)
    return traced.pack(results)


class _Traced:
    """Facts from the trace of an update, equal on every rank."""

    def __init__(
        self, fn: Callable[..., Any], args: Sequence[Any], tensors: list[tf.Tensor]
    ) -> None:
        positions = [i for i, leaf in enumerate(tf.nest.flatten(list(args))) if _is_tensor(leaf)]

        def on_tensors(*replaced: tf.Tensor) -> Any:
            leaves = tf.nest.flatten(list(args))
            for position, tensor in zip(positions, replaced, strict=True):
                leaves[position] = tensor
            return fn(*tf.nest.pack_sequence_as(list(args), leaves))

        signature = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]
        self._concrete = tf.function(on_tensors).get_concrete_function(*signature)
        _refuse_outer_tensors(self._concrete)
        _refuse_collectives(self._concrete)
        outputs = self._concrete.structured_outputs
        self._structure = outputs
        self._present = [leaf is not None for leaf in tf.nest.flatten(outputs)]
        #: A `tf.TensorSpec` for each tensor of the result.
        self.specs = [_spec(leaf) for leaf in tf.nest.flatten(outputs) if leaf is not None]
        #: The structure of the result as text, without its tensors.
        self.pattern = repr(tf.nest.map_structure(lambda leaf: leaf is not None, outputs))
        #: The variables that `fn` assigns, in the order in which it uses them.
        self.assigned = _assigned(self._concrete)

    def run(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Executes the function and returns one tensor for each of `specs`."""
        results = tf.nest.flatten(self._concrete(*tensors))
        return [result for result in results if result is not None]

    def pack(self, tensors: list[tf.Tensor]) -> Any:
        """Returns the tensors in the structure that the function returned."""
        following = iter(tensors)
        leaves = [next(following) if present else None for present in self._present]
        return tf.nest.pack_sequence_as(self._structure, leaves)


def _broadcast_results(
    traced: _Traced, results: list[tf.Tensor], communicator: Communicator
) -> list[tf.Tensor]:
    """Returns the chief's results; other ranks' `results` are ignored."""
    specs = traced.specs
    is_chief = communicator.rank == CHIEF
    dynamic = [i for i, spec in enumerate(specs) if not spec.shape.is_fully_defined()]
    shapes = broadcast_tensors(
        [
            tf.shape(results[i], tf.int64)
            if is_chief
            else tf.zeros([specs[i].shape.rank], tf.int64)
            for i in dynamic
        ],
        Names.of_variables(f"{LABEL}/shapes", dynamic, None),
        communicator,
    )
    if not is_chief:
        shape_of = dict(zip(dynamic, shapes, strict=True))
        results = [
            tf.zeros(shape_of.get(i, spec.shape), spec.dtype) for i, spec in enumerate(specs)
        ]
    # The structure is compared, not shown: two ranks can trace equal tensors in different ones.
    names = Names(LABEL, [""] * len(specs), [traced.pattern] * len(specs))
    received = broadcast_tensors(results, names, communicator)
    for tensor, spec in zip(received, specs, strict=True):
        tensor.set_shape(spec.shape)
    return received


def broadcast_tensors(
    values: Sequence[tf.Tensor], names: Names, communicator: Communicator
) -> list[tf.Tensor]:
    """Returns the chief's tensors; all tensors of one dtype travel in one collective."""
    encoded = [as_native_bits(value, names.label) for value in values]
    groups: dict[Any, list[int]] = {}
    for position, (native, _) in enumerate(encoded):
        groups.setdefault(native.dtype, []).append(position)
    started = [
        start(
            [encoded[i][0] for i in positions],
            Collective(communicator, names.of(positions).part(dtype.name)),
            root=CHIEF,
        )
        for dtype, positions in groups.items()
    ]
    received: list[Any] = [None] * len(values)
    for positions, tensors in zip(groups.values(), wait(started), strict=True):
        for position, tensor in zip(positions, tensors, strict=True):
            received[position] = encoded[position][1](tensor)
    return received


def _assigned(concrete: tf.types.experimental.ConcreteFunction) -> list[tf.Variable]:
    read_only: dict[str, bool] = {}
    for op in concrete.graph.get_operations():
        for index, tensor in enumerate(op.inputs):
            if tensor.dtype == tf.resource:
                reads = op.type in _READING_OPS or index in _read_only_inputs(op)
                read_only[tensor.name] = read_only.get(tensor.name, True) and reads
    variables = {id(variable.handle): variable for variable in concrete.graph.variables}
    return [
        variables[id(outer)]
        for outer, inner in concrete.graph.captures
        if id(outer) in variables and not read_only.get(inner.name, True)
    ]


def _read_only_inputs(op: tf.Operation) -> Sequence[int]:
    try:
        return op.get_attr(_READ_ONLY_ATTR)  # type: ignore[no-any-return]
    except ValueError:
        return ()


def _refuse_outer_tensors(concrete: tf.types.experimental.ConcreteFunction) -> None:
    """Refuses an update that uses tensors of the function around it: its trace is separate."""
    for outer, _ in concrete.graph.captures:
        if tf.is_symbolic_tensor(outer) and outer.dtype != tf.resource:
            raise ValueError(
                f"{LABEL}: fn uses {outer.name}, a tensor of the tf.function around it; "
                "pass that tensor as an argument of fn"
            )


def _refuse_collectives(concrete: tf.types.experimental.ConcreteFunction) -> None:
    ops = compat.ops_in(concrete.graph.as_graph_def())
    if any(op.startswith("Gradring") for op in ops):
        raise ValueError(
            f"{LABEL}: fn calls a collective, and only the chief runs fn; reduce before it, or "
            "after it"
        )


def _spec(leaf: Any) -> tf.TensorSpec:
    if not isinstance(leaf, tf.Tensor | tf.TensorSpec):
        raise TypeError(
            f"{LABEL}: fn returns a {type(leaf).__name__}; return tensors, or nests of them"
        )
    if leaf.shape.rank is None:
        raise ValueError(
            f"{LABEL}: fn returns a {leaf.dtype.name} tensor whose number of dimensions is not "
            "known; give it one with tf.ensure_shape or tf.reshape"
        )
    return tf.TensorSpec(leaf.shape, leaf.dtype)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, tf.Tensor)


@contextlib.contextmanager
def _aborting(communicator: Communicator) -> Iterator[None]:
    """Aborts the group when the block raises, because the other ranks would wait for this one."""
    try:
        yield
    except BaseException as error:
        communicator.abort(f"its {LABEL} raised {described(error)}")
        raise
