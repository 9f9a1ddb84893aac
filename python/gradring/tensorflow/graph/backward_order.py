"""The order of a backward pass: each bucket of gradients starts before work on the next one.

For every layer, a backward pass computes the gradient of the weights, which can be sent, and the
gradient of the inputs, on which the layers before it wait. TensorFlow runs any op that is ready.
On few threads it runs all gradients of inputs first, so the gradients of weights come at the very
end, and no computation is left to hide their communication. Gates make the gradients ready in the
order in which they are sent. A gate is an op of ours that passes a tensor on once a Start has run.

**Why no rewrite of the graph makes a cycle.** Stage s consists of the ops that bucket s is the
first to need. Every tensor that the backward pass hands from an earlier stage to stage s goes
through a gate of Start s-1. No other tensor goes through a gate. Therefore:

1. In the graph as traced, tensors, control edges, tokens and gates lead from a stage to the same or
   a later stage. A gate takes inputs from earlier stages only. This proves that the graph as traced
   has no cycle.
2. TensorFlow adds control edges when the function ends (automatic control dependencies). They lead
   from an op to a later op that uses the same resource, or between two stateful ops without a
   resource. The stages are computed as if all these edges existed.
3. Graph optimizers merge ops that share an input, and an op with the only consumer of its output.
   Two ops of different stages share no tensor of the backward pass, because the later one takes it
   from a gate. An op whose output crosses stages has another consumer besides the gate. Optimizers
   do not know gates and never merge them. Ops of different stages can still share tensors of the
   forward pass, constants, and integers. The assumption is that no optimizer merges an op of the
   backward pass with another op because both take the same activation.

A control edge in place of a gate would not have property 3. An optimizer that merges two gradients
of one layer looks for a path of tensors between them and ignores control edges.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Sequence

import tensorflow as tf

from gradring.tensorflow.graph import compat, refused_graphs
from gradring.tensorflow.graph.fallback import falls_back

#: Prefix of the names that TensorFlow gives to ops of a gradient tape.
_BACKWARD = "gradient_tape/"

#: Private names of TensorFlow (rows of `compat`) that the order needs; without one it is left out.
_NEEDED = (
    "auto_control_deps._get_resource_inputs",
    "auto_control_deps.op_is_stateful",
    "Function.__call__",
    "Operation._update_input",
)

_PASSED_ON = (tf.float32, tf.float64, tf.float16, tf.bfloat16)


@falls_back(
    "the order of the backward pass",
    "results are the same, and less communication is hidden behind computing",
)
def start_as_soon_as_ready(
    buckets: Sequence[Sequence[tf.Tensor]], handles: Sequence[tf.Tensor]
) -> None:
    """Adds gates to the graph that computes the buckets; does nothing when eager.

    Args:
        buckets: Tensors of each bucket, in the order in which the buckets are sent.
        handles: Output `handle` of each bucket's Start op.
    """
    if len(buckets) < 2 or tf.executing_eagerly() or refused_graphs.is_tracing_again():
        return
    if not compat.has(*_NEEDED):
        return
    # A session can execute any part of its graph, even a gate's part without its Start.
    if not tf.compat.v1.get_default_graph().building_function:
        return
    # A gate runs on the CPU; copies from the GPU and back would cost more than the gate hides.
    if tf.config.list_physical_devices("GPU"):
        return
    stages = _Stages(buckets, [handle.op for handle in handles])
    crossing = [
        (op, index, tensor, stage)
        for op, stage in stages.later()
        for index, tensor in enumerate(op.inputs)
        if stages.is_crossing(tensor, stage)
    ]
    if not crossing:
        return
    gates: dict[tuple[str, int], tf.Tensor] = {}
    for _, _, tensor, stage in crossing:
        key = tensor.name, stage
        if key not in gates:
            gates[key] = compat.gate(tensor, handles[stage - 1])
    refused_graphs.note(crossing[-1][0].name)
    done: list[tuple[tf.Operation, int, tf.Tensor]] = []
    try:
        for op, index, tensor, stage in crossing:
            done.append((op, index, tensor))
            compat.replace_input(op, index, gates[tensor.name, stage])
    except BaseException:
        # An optimizer could create a cycle if only some of the gates were in place.
        for undo in done:
            compat.replace_input(*undo)
        raise


class _Stages:
    """Stage of each operation of a graph: the number of the first bucket that needs it."""

    def __init__(
        self, buckets: Sequence[Sequence[tf.Tensor]], starts: Sequence[tf.Operation]
    ) -> None:
        graph, token = starts[0].graph, starts[0].inputs[0]
        own = set(starts)
        self._operations = [op for op in graph.get_operations() if op not in own]
        self._made = {op: number for number, op in enumerate(self._operations)}
        self._ordered_by = {op: _ordered_by(op) for op in self._operations}
        #: Operations without a stage, in creation order, for each key of `_ordered_by`.
        self._chains: dict[Hashable, list[tf.Operation]] = {}
        for op, reasons in self._ordered_by.items():
            for reason in reasons:
                self._chains.setdefault(reason, []).append(op)
        self._stage: dict[tf.Operation, int] = {}
        # The token orders earlier collectives, such as those of a synchronised batch normalisation.
        self._add_ancestors(set(token.consumers()) - own, 0)
        before = set(self._stage)
        for number, (bucket, start) in enumerate(zip(buckets, starts, strict=True)):
            # A tensor from outside the graph is ready from the start.
            ends = [tensor.op for tensor in bucket if tensor.graph is graph]
            self._add_ancestors([*ends, *start.control_inputs], number)
        #: Position of the first op of the buckets' backward pass: a step can have several passes.
        self._first = min(
            (self._made[op] for op in self._stage if op not in before and _BACKWARD in op.name),
            default=0,
        )
        for op in self._operations:
            self._add_unneeded(op)

    def later(self) -> list[tuple[tf.Operation, int]]:
        """Returns the operations after the first stage, with their stages."""
        return [(op, self._stage[op]) for op in self._operations if self._stage[op] > 0]

    def is_crossing(self, tensor: tf.Tensor, stage: int) -> bool:
        """Returns whether the backward pass hands the tensor from an earlier stage to this one."""
        op = tensor.op
        return (
            self._stage[op] < stage
            and self._made[op] >= self._first
            and tensor.dtype in _PASSED_ON
            # A gate would keep TensorFlow from folding the constant.
            and op.type != "Const"
        )

    def _add_unneeded(self, op: tf.Operation) -> None:
        """Puts an operation that no bucket needs into the last stage of its inputs.

        The walk visits inputs first. Creation order is not enough, because gates of an earlier
        reduction were made after the operations that take their outputs.
        """
        to_visit, seen = [op], {op}
        while to_visit:
            op = to_visit[-1]
            before = {tensor.op for tensor in op.inputs}
            missing = [each for each in before if each not in self._stage and each not in seen]
            if missing:
                to_visit += missing
                seen.update(missing)
            else:
                # A loop of TensorFlow 1 is a cycle in the graph, so an input can lack a stage.
                stages = [self._stage[each] for each in before if each in self._stage]
                self._stage.setdefault(op, max(stages, default=0))
                to_visit.pop()

    def _add_ancestors(self, ends: Iterable[tf.Operation], stage: int) -> None:
        """Puts `ends` and all their ancestors into a stage, except those in an earlier one."""
        to_visit = list(ends)
        while to_visit:
            op = to_visit.pop()
            if op not in self._stage:
                self._stage[op] = stage
                to_visit += [tensor.op for tensor in op.inputs]
                to_visit += op.control_inputs
                to_visit += self._ordered_before(op)

    def _ordered_before(self, op: tf.Operation) -> list[tf.Operation]:
        """Returns ops that TensorFlow may order before this one; each op only once per key."""
        before = []
        for reason in self._ordered_by[op]:
            chain = self._chains[reason]
            count = bisect_left(chain, self._made[op], key=self._made.__getitem__)
            before += chain[:count]
            self._chains[reason] = chain[count:]
        return before


def _ordered_by(op: tf.Operation) -> set[Hashable]:
    """Returns the keys by which TensorFlow orders an operation when the traced function ends.

    A key is the name of a resource, or None for a stateful op without a resource. TensorFlow chains
    operations with a common key in creation order.
    """
    kinds = (tf.resource, tf.variant)
    takes_any = any(tensor.dtype in kinds for tensor in op.inputs)
    taken = compat.resource_inputs(op) if takes_any else ()
    resources: set[Hashable] = {tensor.name for tensor, _ in taken}
    return resources or ({None} if compat.op_is_stateful(op) else resources)
