"""The Start and Wait ops, their ordering token and their derivatives.

Start hands tensors to gradring's engine and returns at once; Wait blocks until they are done. The
tensors in between carry shapes and gradients from Start to Wait; their contents mean nothing.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from gradring import _native
from gradring.gradients.names import Label
from gradring.gradients.reduction import Collective
from gradring.group.arrays import Place
from gradring.group.communicator import Communicator, core_of, open_groups
from gradring.tensorflow.graph import compat, failures, retracing, session_order, vectorize

#: Largest group in which all ranks are connected with each other; `MESH_RANKS_MAX` of the core.
ALL_TO_ALL_RANKS_MAX = 64
#: Function that AutoGraph makes from a loop over a dataset in a `tf.function`.
_LOOP_OVER_DATASET = "Dataset_scan_scan_body"

_tokens: weakref.WeakKeyDictionary[Communicator, Any] = weakref.WeakKeyDictionary()


def start(
    tensors: list[tf.Tensor], collective: Collective, root: int | None = None
) -> list[tf.Tensor]:
    """Starts an all-reduce, or a broadcast.

    Args:
        tensors: A bucket of tensors of one dtype that the engine takes.
        collective: Group, label, op and check.
        root: For a broadcast, the rank whose tensors all ranks get.

    Returns:
        The tensors in flight, of the same shapes and dtype, and the handle last.
    """
    if root is None:
        return _start("all_reduce", tensors, collective, collective.op)
    return _start("broadcast", tensors, collective, root=root)


def start_all_to_all(
    tensor: tf.Tensor, collective: Collective, target: tf.Tensor | None = None
) -> list[tf.Tensor]:
    """Starts an all-to-all exchange of equal parts of a tensor.

    Args:
        tensor: Tensor whose first dimension is a multiple of the world size: part r is for rank r.
        collective: Group, label and check.
        target: Tensor of the same shape, into which parts are received. This rank's own part of the
            result is that of the target. Default: `tensor`, which has that part in place.

    Returns:
        Three tensors: in flight, the tensor itself and the parts from all ranks, in rank order; and
        the handle.
    """
    return _start("all_to_all", [tensor, tensor if target is None else target], collective)


def start_all_to_all_v(
    tensor: tf.Tensor, sent: tf.Tensor, received: tf.Tensor, collective: Collective
) -> list[tf.Tensor]:
    """Starts an all-to-all exchange of rows.

    Args:
        tensor: This rank's rows, in the order of the ranks that they are for.
        sent: int64 of shape `[world_size]`: number of rows for each rank.
        received: int64 of shape `[world_size]`: number of rows from each rank, which the ranks have
            exchanged before.
        collective: Group, label and check.

    Returns:
        The rows from all ranks in flight, in rank order, and the handle.
    """
    inputs = {"sent": sent, "received": received, "tensor": tensor}
    return _run_start("GradringAllToAllVStart", inputs, [tensor], collective, {})


def start_reduce_scatter(tensor: tf.Tensor, collective: Collective) -> list[tf.Tensor]:
    """Starts a reduce-scatter; `row_counts` gives each rank's number of rows.

    Returns:
        The tensor in flight, and the handle. Only this rank's rows of the tensor are a result.
    """
    return _start("reduce_scatter", [tensor], collective, collective.op)


def start_reduce_scatter_v(
    tensors: list[tf.Tensor], counts: tf.Tensor, collective: Collective
) -> list[tf.Tensor]:
    """Starts a reduce-scatter of a bucket, with a number of elements for each rank.

    Args:
        tensors: A bucket of tensors of one dtype that the engine takes.
        counts: int64 of shape `[world_size]`: every rank's number of consecutive elements of the
            bucket.
        collective: Group, label, op and check.

    Returns:
        The tensors in flight, and the handle. Only this rank's elements are a result.
    """
    inputs = {"counts": counts, "tensors": tensors}
    attributes: dict[str, str | int] = {"reduce_op": collective.op}
    return _run_start("GradringReduceScatterVStart", inputs, tensors, collective, attributes)


def row_counts(tensor: tf.Tensor, world_size: int) -> tf.Tensor:
    """Returns each rank's number of rows of a tensor divided as by ``numpy.array_split``."""
    rows = tf.shape(tensor, tf.int64)[0]
    ranks = tf.range(world_size, dtype=tf.int64)
    return rows // world_size + tf.cast(ranks < rows % world_size, tf.int64)


def own_rows(tensor: tf.Tensor, communicator: Communicator) -> tf.Tensor:
    """Returns this rank's rows of a tensor divided as by ``numpy.array_split``."""
    rank, world_size = communicator.rank, communicator.world_size
    if tensor.shape[0] is not None:
        return tensor[Place(rank, world_size).rows(tensor.shape[0])]
    ends = tf.cumsum(row_counts(tensor, world_size))
    return tensor[(ends[rank - 1] if rank else 0) : ends[rank]]


def _start(
    kind: str, tensors: list[tf.Tensor], collective: Collective, op: str = "", root: int = 0
) -> list[tf.Tensor]:
    attributes: dict[str, str | int] = {"collective": kind, "reduce_op": op, "root": root}
    return _run_start("GradringStart", {"tensors": tensors}, tensors, collective, attributes)


def _run_start(
    name: str,
    inputs: dict[str, Any],
    tensors: Sequence[tf.Tensor],
    collective: Collective,
    attributes: dict[str, str | int],
) -> list[tf.Tensor]:
    """Runs an op that starts a collective.

    Args:
        name: Registered name of the op.
        inputs: Inputs of the op behind the token, by name.
        tensors: The tensors of the collective among the inputs; the op returns as many in flight.
        collective: Group, label and check.
        attributes: Attributes of this kind of op.
    """
    check = collective.check
    common: dict[str, str | int] = {
        "label": collective.label.shown,
        "identity": collective.label.compared,
        "communicator": core_of(collective.communicator).id,
        "check": check.action,
        "variables": "\n".join(check.variables) if check.action else "",
        "of_own_samples": int(check.of_own_samples),
        "origin": _origin(),
    }
    _check_place(collective)
    order = session_order.of_this_graph(collective.label.shown)
    inputs = {"token": _token(collective.communicator, order), **inputs}

    def run() -> list[tf.Tensor]:
        dtype, count = tensors[0].dtype, len(tensors) + 1
        with tf.device("/device:CPU:0"):
            return compat.run_op(name, inputs, attributes | common, count, dtype=dtype, unseen=True)

    return run() if order is None else session_order.make(order, run)


def wait(started: Sequence[list[tf.Tensor]]) -> list[list[tf.Tensor]]:
    """Waits for all given starts; the first Wait runs after the last Start.

    Returns:
        The tensors of each start, without its handle.
    """
    handles = [handle for *_, handle in started]
    with tf.device("/device:CPU:0"), tf.control_dependencies(handles):
        return [
            compat.run_op(
                "GradringWait",
                {"inflight": inflight, "handle": handle},
                {},
                len(inflight),
                dtype=inflight[0].dtype,
            )
            for *inflight, handle in started
        ]


def reduce(tensors: list[tf.Tensor], collective: Collective) -> list[tf.Tensor]:
    """Starts an all-reduce and waits for it."""
    return wait([start(tensors, collective)])[0]


def start_all_gather(
    tensor: tf.Tensor, counts: tf.Tensor, collective: Collective
) -> list[tf.Tensor]:
    """Starts a gathering of rows.

    Args:
        tensor: This rank's rows.
        counts: int64 of shape `[world_size]`: every rank's number of rows.
        collective: Group, label and check.

    Returns:
        The gathered tensor in flight, and the handle last.
    """
    inputs = {"counts": counts, "tensor": tensor}
    return _run_start("GradringAllGatherStart", inputs, [tensor], collective, {})


def start_all_gather_v(
    memory: list[tf.Tensor], parts: list[tf.Tensor], counts: tf.Tensor, collective: Collective
) -> list[tf.Tensor]:
    """Starts an all-gather of a bucket, with a number of elements for each rank.

    Args:
        memory: Tensors of the bucket's shapes and dtype. Their values do not count; the results are
            in their memory if nothing else needs it.
        parts: This rank's part of each tensor.
        counts: int64 of shape `[world_size]`: every rank's number of consecutive elements of the
            bucket.
        collective: Group, label and check.

    Returns:
        The gathered tensors in flight, and the handle last.
    """
    inputs = {"counts": counts, "memory": memory, "parts": parts}
    return _run_start("GradringAllGatherVStart", inputs, memory, collective, {})


def eager_step(communicator: Communicator) -> contextlib.AbstractContextManager[None]:
    """Counts the block as a step of an eager program; in a graph, each execution is a step."""
    return communicator.step() if tf.executing_eagerly() else contextlib.nullcontext()


def _origin() -> str:
    """Returns the origin of an op that is created now: eager code, a function or a dataset."""
    if tf.executing_eagerly():
        return "eager"
    return "function" if _dataset_function() is None else "dataset"


def _check_place(collective: Collective) -> None:
    """Refuses a collective in a function of a dataset.

    Raises:
        NotImplementedError: The function that is being traced belongs to a dataset.
    """
    communicator = collective.communicator
    if _dataset_function() not in (None, _LOOP_OVER_DATASET):
        raise NotImplementedError(
            f"'{collective.label.shown}' on rank {communicator.rank} of {communicator.host}: "
            "a collective in a function of a tf.data.Dataset, such as its `map`, runs whenever the "
            "dataset reads ahead. Nothing orders it with the collectives of the training; call it "
            "in the step that gets the batch"
        )


def _token(communicator: Communicator, order: session_order.Order | None) -> tf.Tensor:
    """Returns the ordering token, a scalar resource, of the communicator or of `order`'s graph."""
    if order is not None:
        _prepare(communicator)
        handle = order.token
        graph = tf.compat.v1.get_default_graph()
        return handle if graph is handle.graph else _capture(handle, graph)
    if communicator not in _tokens:
        _prepare(communicator)
        _tokens[communicator] = ordering_token()
    return captured(_tokens[communicator])


def captured(token: Any) -> tf.Tensor:
    """Returns the handle of an ordering token, for an op that is created now."""
    if tf.executing_eagerly():
        return token.handle
    return _capture(token.handle, tf.compat.v1.get_default_graph())


def _capture(tensor: tf.Tensor, graph: tf.Graph) -> tf.Tensor:
    """Captures the eager `tensor` into the `tf.FuncGraph` that is being built.

    Branches and loop bodies capture the tensor from the function around them, because TensorFlow
    has no gradients for conditionals and loops that capture eager tensors directly. Functions that
    are called in a branch or body capture it in the same way: ops keep their order only if they
    take the same tensor.
    """
    has_it = any(captured is tensor for captured, _ in graph.captures)
    outer = graph.outer_graph
    if has_it or not compat.is_control_flow(graph) or not isinstance(outer, compat.FuncGraph):
        return graph.capture(tensor)
    inside = graph.capture(_capture(tensor, outer))
    plain = graph.capture

    def captured(other: Any, *args: Any, **kwargs: Any) -> Any:
        return inside if other is tensor else plain(other, *args, **kwargs)

    graph.capture = captured
    return inside


def _prepare(communicator: Communicator) -> None:
    _native.tensorflow_register()
    retracing.watch(communicator)
    failures.install()


@tf.RegisterGradient("GradringWait")  # type: ignore[untyped-decorator]
def _wait_gradient(_op: Any, *gradients: Any) -> list[Any]:
    return [*gradients, None]


@tf.RegisterGradient("GradringGate")  # type: ignore[untyped-decorator]
def _gate_gradient(_op: Any, gradient: Any) -> list[Any]:
    return [gradient, None]


@tf.RegisterGradient("GradringStart")  # type: ignore[untyped-decorator]
def _start_gradient(op: Any, *gradients: Any) -> list[Any]:
    """Sends gradients back to the ranks whose inputs this rank's loss depends on."""
    kind, of_op, root = _what(op.get_attr)
    collective = _started(op.get_attr, of_op)
    *upstream, _handle = gradients
    inputs = op.inputs[1:]
    if all(gradient is None for gradient in upstream) or not inputs[0].dtype.is_floating:
        return [None] * (1 + len(inputs))
    filled = [
        tf.zeros_like(tensor) if gradient is None else tf.convert_to_tensor(gradient)
        for tensor, gradient in zip(inputs, upstream, strict=True)
    ]
    part = _linear(collective, "gradient")
    if kind == "all_to_all":
        return [None, *_all_to_all_gradients(filled, part)]
    if kind == "broadcast":
        return [None, *_reduce_to(root, filled, part)]
    if kind == "reduce":
        started = start(filled, part, root)
        return [None, *_divided(wait([started])[0], part)]
    if kind == "reduce_scatter":
        (gradient,) = filled
        group = part.communicator
        counts = row_counts(gradient, group.world_size)
        started = start_all_gather(own_rows(gradient, group), counts, part)
        return [None, *_divided(wait([started])[0], part)]
    return [None, *reduce(filled, part)]


def _reduce_to(root: int, tensors: list[tf.Tensor], collective: Collective) -> list[tf.Tensor]:
    """Returns the sums of all ranks' tensors on the root, and zeros on all other ranks."""
    (sums,) = wait([_start("reduce", tensors, collective, "sum", root)])
    # TensorFlow's optimizer must not know the value: it would fold the selection below, and
    # the order of the reduction with other collectives would be lost.
    is_root = tf.raw_ops.PlaceholderWithDefault(
        input=tf.constant(collective.communicator.rank == root), shape=[]
    )
    # On all ranks the result depends on the reduction, so every rank has its second derivative.
    return [tf.where(is_root, total, tf.zeros_like(total)) for total in sums]


def _divided(tensors: list[tf.Tensor], collective: Collective) -> list[tf.Tensor]:
    """Scales gradients by 1/N for a mean."""
    if collective.op == "sum":
        return tensors
    return [tensor / collective.communicator.world_size for tensor in tensors]


def _all_to_all_gradients(
    upstream: Sequence[tf.Tensor], collective: Collective
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the gradients of the sent tensor and of the target.

    The gradient of a sent part comes back from its receiver. The gradient of the target is that of
    this rank's own part, which was not received but taken from the target.
    """
    of_tensor, of_received = upstream
    group = collective.communicator
    is_own = tf.repeat(
        tf.range(group.world_size) == group.rank, tf.shape(of_received)[0] // group.world_size
    )
    is_own = tf.reshape(is_own, [-1] + [1] * (len(of_received.shape) - 1))
    nothing = tf.zeros_like(of_received)
    ((_, back),) = wait([start_all_to_all(of_received, collective, nothing)])
    return of_tensor + back, tf.where(is_own, of_received, nothing)


@tf.RegisterGradient("GradringAllGatherStart")  # type: ignore[untyped-decorator]
def _all_gather_gradient(op: Any, upstream: Any, _handle: Any) -> list[Any]:
    """Returns the gradient of this rank's rows: a sum over all ranks, because all have the rows."""
    if upstream is None or not upstream.dtype.is_floating:
        return [None, None, None]
    gathering = _started(op.get_attr)
    group = gathering.communicator
    (total,) = reduce([tf.convert_to_tensor(upstream)], gathering.part("gradient"))
    own = tf.split(total, op.inputs[1], num=group.world_size)[group.rank]
    own.set_shape(op.inputs[2].shape)
    return [None, None, own]


@tf.RegisterGradient("GradringAllToAllVStart")  # type: ignore[untyped-decorator]
def _all_to_all_v_gradient(op: Any, upstream: Any, _handle: Any) -> list[Any]:
    """Sends the gradient of each row back to the rank that the row came from."""
    _, sent, received, tensor = op.inputs
    if upstream is None or not upstream.dtype.is_floating:
        return [None] * 4
    part = _started(op.get_attr).part("gradient")
    started = start_all_to_all_v(tf.convert_to_tensor(upstream), received, sent, part)
    ((back,),) = wait([started])
    back.set_shape(tensor.shape)
    return [None, None, None, back]


def _start_tangents(attrs: dict[str, Any], inputs: Any, outputs: Any, tangents: Any) -> list[Any]:
    """Performs the same collective on the tangents, because the collective is linear."""
    kind, of_op, root = _what(attrs.__getitem__)
    collective = _started(attrs.__getitem__, of_op)
    if not inputs[1].dtype.is_floating:
        return [None] * len(outputs)
    part = _linear(collective, "tangent")
    reduces = kind in ("all_reduce", "reduce", "reduce_scatter")
    started = _start(kind, list(tangents[1:]), part, part.op if reduces else "", root)
    return [*wait([started])[0], None]


def _all_gather_tangents(
    attrs: dict[str, Any], inputs: Any, outputs: Any, tangents: Any
) -> list[Any]:
    if not inputs[2].dtype.is_floating:
        return [None] * len(outputs)
    gathering = _started(attrs.__getitem__)
    started = start_all_gather(tangents[2], inputs[1], gathering.part("tangent"))
    return [*wait([started])[0], None]


def _all_to_all_v_tangents(
    attrs: dict[str, Any], inputs: Any, outputs: Any, tangents: Any
) -> list[Any]:
    _, sent, received, tensor = inputs
    if not tensor.dtype.is_floating:
        return [None] * len(outputs)
    part = _started(attrs.__getitem__).part("tangent")
    return [*wait([start_all_to_all_v(tangents[3], sent, received, part)])[0], None]


def _register_tangents(op: str, rule: Callable[..., list[Any]]) -> None:
    """Registers the rule of an op for `tf.autodiff.ForwardAccumulator`.

    Args:
        op: Registered name of the op.
        rule: Takes the op's attributes, inputs, outputs and the inputs' tangents; returns the
            tangents of the outputs.
    """

    def special(attrs: Sequence[Any], *args: Any) -> list[Any]:
        return rule(dict(zip(attrs[::2], attrs[1::2], strict=True)), *args)

    compat.TANGENTS[op] = special


_register_tangents("GradringStart", _start_tangents)
_register_tangents("GradringAllGatherStart", _all_gather_tangents)
_register_tangents("GradringAllToAllVStart", _all_to_all_v_tangents)
vectorize.register()


def _started(attr: Callable[[str], Any], op: str = "sum") -> Collective:
    """Returns the collective that an op with these attributes has started.

    Raises:
        NotImplementedError: TensorFlow cannot compute a derivative at this place.
    """
    label = Label(_text(attr("label")), _text(attr("identity")))
    if _is_lost_in_control_flow():
        raise NotImplementedError(
            f"'{label.shown}': TensorFlow cannot compute a gradient through a collective in a "
            "tf.function that a conditional or a loop calls. Under a persistent tape, or for a "
            "second derivative, nested conditionals and loops have the same limit; call the "
            "function's python_function, or move the collective out"
        )
    return Collective(_communicator(attr("communicator")), label, op)


def _is_lost_in_control_flow() -> bool:
    """Returns whether a gradient is being built of a function that a branch or loop body calls.

    TensorFlow cannot trace resources back through such a function. Under persistent tapes and for
    second derivatives, it also makes functions from nested conditionals and loops by itself.
    """
    if None in (compat.graph_stack, *compat.CONTROL_FLOW_GRADIENTS):
        return False  # TensorFlow's own error is less clear
    is_of_control_flow = False
    for graph in compat.graph_stack.stack:
        if isinstance(graph, compat.CONTROL_FLOW_GRADIENTS):
            is_of_control_flow = True
        elif is_of_control_flow and not compat.is_control_flow(graph):
            return True
    return False


def _what(attr: Callable[[str], Any]) -> tuple[str, str, int]:
    """Returns the kind, the reduce op and the root of a Start with these attributes.

    The op is "sum" for kinds that reduce nothing, because they are as linear as a sum.
    """
    return _text(attr("collective")), _text(attr("reduce_op")) or "sum", attr("root")


def _linear(collective: Collective, derivative: str) -> Collective:
    """Returns the collective for derivatives, with the same op.

    Raises:
        LookupError: The op has no derivative.
    """
    if collective.op not in ("sum", "mean"):
        raise LookupError(
            f"'{collective.label.shown}': no gradient is defined through {collective.op}; "
            "use sum or mean, or tf.stop_gradient"
        )
    return collective.part(derivative, collective.op)


def _communicator(number: int) -> Communicator:
    """Returns the open communicator with this number.

    Raises:
        LookupError: It has been closed.
    """
    for communicator in open_groups:
        if core_of(communicator).id == number:
            return communicator
    raise LookupError(
        "the communicator of this reduction is gone, so its gradient cannot be reduced; "
        "keep the communicator or the strategy alive"
    )


def _text(attr: bytes | str) -> str:
    return attr.decode() if isinstance(attr, bytes) else attr


def ordering_token() -> tf.Variable:
    """Makes a scalar resource variable outside every graph, strategy and distribution scope.

    Ops that take its handle keep their program order, also across `tf.cond` and `tf.while_loop`.
    The error for a SavedModel that would contain such an op shows the name of the variable.
    """
    return compat.plain_variable(0.0, "a_function_with_a_collective_cannot_be_exported")


def _dataset_function() -> str | None:
    """Returns the name of the dataset's function being traced, such as a `map`'s; else None.

    The body of `for batch in dataset` has the name `_LOOP_OVER_DATASET`. It is no part of the input
    pipeline: it runs in its place in the program.
    """
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        name = getattr(graph, "name", None) or ""
        if name.startswith("Dataset_"):
            return name
        graph = getattr(graph, "outer_graph", None)
    return None
