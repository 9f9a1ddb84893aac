"""The order of a backward pass: each bucket of gradients starts before the next is worked on.

For every layer a backward pass computes the gradient of the layer's weights, which can be sent,
and that of its inputs, on which the layers before it wait. TensorFlow runs whichever is ready,
and with few threads it runs all gradients of inputs first: the gradients of weights, and with
them the communication, come at the very end, when there is nothing left to hide behind. Gates
make the gradients ready in the order in which they are sent: a gate is an op of ours that passes
a tensor on once a Start has run.

**Why no rewrite of the graph makes a cycle of it.** Stage s is what bucket s is the first to need.
Every tensor that the backward pass hands from an earlier stage to stage s goes through a gate of
Start s-1, and only such tensors do. So:

1. In the graph as it is, tensors, control edges, tokens and gates lead from a stage to the same or
   a later one, and into a gate's stage from earlier ones only. That is a proof, for what is there.
2. Control edges that TensorFlow adds when the function ends (automatic control dependencies) lead
   from an op to one that was made later and has to do with the same resource, or has side effects
   on nothing in particular as well. Stages count all these as there.
3. Optimizers merge ops that share an input, or of which one takes the other's only output. Two ops
   of different stages share no tensor of the backward pass, since the later one has it from a gate;
   and an output that crosses is not the only one. A gate they neither know nor merge. What is left
   to share are tensors of the forward pass, constants, and integers. What this relies on: no
   optimizer merges an op of the backward pass with another one because both take an activation.

A control edge instead of a gate has no third property: an optimizer that merges two gradients of
one layer does not look for a way from one to the other that is no tensor.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Sequence

import tensorflow as tf

from gradring.tensorflow.graph import compat, refused_graphs
from gradring.tensorflow.graph.fallback import falls_back

#: By which TensorFlow calls what a tape makes.
_BACKWARD = "gradient_tape/"

#: Rows of `compat` without which the order is left out.
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
        handles: That of the Start op of each bucket.
    """
    if len(buckets) < 2 or tf.executing_eagerly() or refused_graphs.is_tracing_again():
        return
    if not compat.has(*_NEEDED):
        return
    # A session may execute any part of its graph, also a part without the Start of a gate.
    if not tf.compat.v1.get_default_graph().building_function:
        return
    # A gate is on the CPU; there and back would cost more than is hidden.
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
        # An optimizer could make a cycle of an operation that has only some of its gates.
        for undo in done:
            compat.replace_input(*undo)
        raise


class _Stages:
    """To which bucket each operation of a graph belongs: the first one that needs it."""

    def __init__(
        self, buckets: Sequence[Sequence[tf.Tensor]], starts: Sequence[tf.Operation]
    ) -> None:
        graph, token = starts[0].graph, starts[0].inputs[0]
        own = set(starts)
        self._operations = [op for op in graph.get_operations() if op not in own]
        self._made = {op: number for number, op in enumerate(self._operations)}
        self._ordered_by = {op: _ordered_by(op) for op in self._operations}
        #: By what orders them, operations that are in no stage yet.
        self._chains: dict[Hashable, list[tf.Operation]] = {}
        for op, reasons in self._ordered_by.items():
            for reason in reasons:
                self._chains.setdefault(reason, []).append(op)
        self._stage: dict[tf.Operation, int] = {}
        # The token orders what was started before, as by a synchronised batch normalisation.
        self._add_ancestors(set(token.consumers()) - own, 0)
        before = set(self._stage)
        for number, (bucket, start) in enumerate(zip(buckets, starts, strict=True)):
            # A tensor from outside the graph is ready anyhow.
            ends = [tensor.op for tensor in bucket if tensor.graph is graph]
            self._add_ancestors([*ends, *start.control_inputs], number)
        #: Where the backward pass of the buckets begins: a step may have had others before.
        self._first = min(
            (self._made[op] for op in self._stage if op not in before and _BACKWARD in op.name),
            default=0,
        )
        for op in self._operations:
            self._add_unneeded(op)

    def later(self) -> list[tuple[tf.Operation, int]]:
        """The operations after the first stage, and their stages."""
        return [(op, self._stage[op]) for op in self._operations if self._stage[op] > 0]

    def is_crossing(self, tensor: tf.Tensor, stage: int) -> bool:
        """Whether the backward pass hands the tensor to this stage from an earlier one."""
        op = tensor.op
        return (
            self._stage[op] < stage
            and self._made[op] >= self._first
            and tensor.dtype in _PASSED_ON
            # TensorFlow must remain free to fold it.
            and op.type != "Const"
        )

    def _add_unneeded(self, op: tf.Operation) -> None:
        """Puts what no bucket needs into the last stage of its inputs.

        Gates of an earlier reduction were made after the operations that take them.
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
                # A loop of TensorFlow 1 leads back to its begin.
                stages = [self._stage[each] for each in before if each in self._stage]
                self._stage.setdefault(op, max(stages, default=0))
                to_visit.pop()

    def _add_ancestors(self, ends: Iterable[tf.Operation], stage: int) -> None:
        """Puts `ends` and all they need into a stage, unless they are in an earlier one."""
        to_visit = list(ends)
        while to_visit:
            op = to_visit.pop()
            if op not in self._stage:
                self._stage[op] = stage
                to_visit += [tensor.op for tensor in op.inputs]
                to_visit += op.control_inputs
                to_visit += self._ordered_before(op)

    def _ordered_before(self, op: tf.Operation) -> list[tf.Operation]:
        """What TensorFlow may order before an operation, unless it was returned already."""
        before = []
        for reason in self._ordered_by[op]:
            chain = self._chains[reason]
            count = bisect_left(chain, self._made[op], key=self._made.__getitem__)
            before += chain[:count]
            self._chains[reason] = chain[count:]
        return before


def _ordered_by(op: tf.Operation) -> set[Hashable]:
    """What TensorFlow may order an operation with others by, when the function ends that is traced.

    These are resources; or None for side effects on nothing in particular. Operations that have one
    in common are chained as they were made.
    """
    kinds = (tf.resource, tf.variant)
    takes_any = any(tensor.dtype in kinds for tensor in op.inputs)
    taken = compat.resource_inputs(op) if takes_any else ()
    resources: set[Hashable] = {tensor.name for tensor, _ in taken}
    return resources or ({None} if compat.op_is_stateful(op) else resources)
