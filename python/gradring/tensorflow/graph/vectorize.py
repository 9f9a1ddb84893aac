"""One collective for all iterations of a vectorised loop.

`tf.vectorized_map`, `tape.jacobian` and `tape.batch_jacobian` turn each op of a loop body into one
op on stacked tensors, which have a first dimension for the iterations. A reduction or a broadcast
treats every element by itself, so the same op works on a stacked tensor. A collective on rows first
moves the dimension of rows before that of iterations. Tensors that are equal in all iterations are
sent once.

The traced ops of the body stay in the graph because they are stateful. They run for the first
iteration, and their results are ignored.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from gradring.tensorflow.graph import compat

#: Starts of collectives on rows; the numbers of rows come before the tensor in their inputs.
_OF_ROWS = ("GradringAllGatherStart", "GradringAllToAllVStart")


def register() -> None:
    """Registers the rules for our ops with TensorFlow; repeated calls are allowed."""
    if not compat.has("pfor.RegisterPFor", "pfor.wrap", "pfor._create_op"):
        return
    compat.RegisterPFor("GradringStart")(_start)
    for op in _OF_ROWS:
        compat.RegisterPFor(op)(_start_of_rows)
    compat.RegisterPFor("GradringWait")(_wait)
    # A vectorised loop has no backward pass of its own to order.
    compat.RegisterPFor("GradringGate")(lambda loop: [loop.inputs[0]])


def _start(loop: Any) -> list[Any]:
    _, *tensors = loop.inputs
    divides = loop.op.get_attr("collective") in (b"all_to_all", b"reduce_scatter")
    if divides and tensors[0].is_stacked:
        raise NotImplementedError(
            f"'{loop.op.get_attr('label').decode()}': iterations of a vectorised loop cannot send "
            "parts to ranks; use tf.map_fn"
        )
    results = _again(loop.op, [tensor.t for tensor in loop.inputs])
    return [*_like(tensors, results), compat.stacked_or_not(results[-1], False)]


def _start_of_rows(loop: Any) -> list[Any]:
    *others, tensor = loop.inputs
    if any(other.is_stacked for other in others):
        raise NotImplementedError(
            f"'{loop.op.get_attr('label').decode()}': iterations of a vectorised loop cannot send "
            "different numbers of rows; use tf.map_fn, or make them equal"
        )
    rows = _exchanged(tensor.t) if tensor.is_stacked else tensor.t
    received, handle = _again(loop.op, [*(other.t for other in others), rows])
    return [*_like([tensor], [received]), compat.stacked_or_not(handle, False)]


def _wait(loop: Any) -> list[Any]:
    *tensors, handle = loop.inputs
    if handle.is_stacked:
        raise NotImplementedError(
            "each iteration of this vectorised loop has a collective of its own, which this one "
            "cannot wait for; use tf.map_fn instead"
        )
    results = _again(loop.op, [tensor.t for tensor in loop.inputs])
    if tensors[0].is_stacked and tensors[0].t.op.type in _OF_ROWS:
        results = [_exchanged(result) for result in results]
    return _like(tensors, results)


def _again(op: Any, inputs: list[Any]) -> list[Any]:
    with tf.device("/device:CPU:0"):
        return _same_op(op, inputs)


def _like(tensors: list[Any], results: list[Any]) -> list[Any]:
    """Marks each result as stacked if its tensor is stacked."""
    return [
        compat.stacked_or_not(result, tensor.is_stacked)
        for tensor, result in zip(tensors, results, strict=False)
    ]


def _exchanged(tensor: Any) -> Any:
    """Exchanges the first two dimensions: iterations and rows."""
    return tf.transpose(tensor, tf.concat([[1, 0], tf.range(2, tf.rank(tensor))], 0))


def _same_op(op: tf.Operation, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
    """Adds an op like `op` of a vectorised loop's body to the graph, with other inputs."""
    dtypes = [output.dtype for output in op.outputs]
    return list(compat.create_vectorised(op.type, inputs, dtypes, op.node_def.attr).outputs)
