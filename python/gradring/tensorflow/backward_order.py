"""Lets each bucket of gradients start before the backward pass works on the next.

For every layer a backward pass computes the gradient of the layer's weights, which can be sent,
and that of its inputs, on which the layers before it wait. TensorFlow runs whichever is ready,
and with few threads it runs all gradients of inputs first: the gradients of weights, and with
them the communication, come at the very end, when there is nothing left to hide behind. Control
edges from each Start to what only later buckets need make the gradients ready in the order in
which they are sent, and send them when they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import tensorflow as tf

from gradring.tensorflow import compat


def start_as_soon_as_ready(
    buckets: Sequence[Sequence[tf.Tensor]], starts: Sequence[tf.Tensor]
) -> None:
    """Adds control edges to the graph that computes the buckets; does nothing when eager.

    An operation belongs to the first bucket that needs it. Edges lead from the Start of a bucket
    to operations of the next one. Since tensors flow from earlier buckets to later ones only, no
    cycle can arise; collectives issued before, as by a synchronised batch normalisation, come
    before the first Start in the order of the token, so they and all they need belong to the
    first bucket.

    Args:
        buckets: Tensors of each bucket, in the order in which the buckets are sent.
        starts: A tensor made by the Start op of each bucket.
    """
    if len(buckets) < 2 or tf.executing_eagerly():
        return
    start_ops = [tensor.op for tensor in starts]
    graph, token = start_ops[0].graph, start_ops[0].inputs[0]
    bucket_of: dict[tf.Operation, int] = {}
    _add_ancestors(set(token.consumers()) - set(start_ops), bucket_of, 0)
    for number, bucket in enumerate(buckets):
        # A tensor from outside the graph is ready anyhow.
        ends = [tensor.op for tensor in bucket if tensor.graph is graph]
        for op in _add_ancestors(ends, bucket_of, number):
            if number > 0 and _waits_for_earlier_alone(op, bucket_of, number):
                compat.add_control_input(op, start_ops[number - 1])


def _add_ancestors(
    ends: Iterable[tf.Operation], bucket_of: dict[tf.Operation, int], number: int
) -> list[tf.Operation]:
    """Marks `ends` and all they need, unless an earlier bucket did; returns what it marked."""
    added: list[tf.Operation] = []
    to_visit = list(ends)
    while to_visit:
        op = to_visit.pop()
        if op not in bucket_of:
            bucket_of[op] = number
            added.append(op)
            to_visit += [tensor.op for tensor in op.inputs]
            to_visit += op.control_inputs
    return added


def _waits_for_earlier_alone(
    op: tf.Operation, bucket_of: dict[tf.Operation, int], number: int
) -> bool:
    """Whether `op` could run as soon as earlier buckets' operations have."""
    needed = [bucket_of[tensor.op] for tensor in op.inputs]
    # Without inputs it is a constant, which TensorFlow must remain free to fold.
    return bool(needed) and max(needed) < number
