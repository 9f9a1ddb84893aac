"""The Start and Wait ops, their ordering token and their derivatives.

Start hands tensors to gradring's engine and returns at once; Wait blocks until they are done. The
tensors in between lead shapes and gradients from one to the other; what they contain means nothing.
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

#: With more ranks, not all are connected with one another; `MESH_RANKS_MAX` of the core.
ALL_TO_ALL_RANKS_MAX = 64
#: What AutoGraph makes of a loop in a `tf.function`.
_LOOP_OVER_DATASET = "Dataset_scan_scan_body"

_tokens: weakref.WeakKeyDictionary[Communicator, Any] = weakref.WeakKeyDictionary()


def start(
    tensors: list[tf.Tensor], collective: Collective, root: int | None = None
) -> list[tf.Tensor]:
    """Starts an all-reduce, or a broadcast.

    Args:
        tensors: A bucket of tensors of one dtype that the engine takes.
        collective: What it is called, does and checks.
        root: For a broadcast, the rank whose contents win.

    Returns:
        The tensors in flight, of the same shapes and dtype, and the handle last.
    """
    if root is None:
        return _start("all_reduce", tensors, collective, collective.op)
    return _start("broadcast", tensors, collective, root=root)


def start_all_to_all(
    tensor: tf.Tensor, collective: Collective, target: tf.Tensor | None = None
) -> list[tf.Tensor]:
    """Starts to give every rank its part of a tensor.

    Args:
        tensor: Of a first dimension that divides evenly by the world size: part r is for rank r.
        collective: What it is called and checks.
        target: Of the same shape: what this rank's own part is of the result. Default: `tensor`, so
            that what a rank has for itself is in place.

    Returns:
        In flight, the tensor itself, and what all ranks have for this one, in rank order; and the
        handle last.
    """
    return _start("all_to_all", [tensor, tensor if target is None else target], collective)


def start_all_to_all_v(
    tensor: tf.Tensor, sent: tf.Tensor, received: tf.Tensor, collective: Collective
) -> list[tf.Tensor]:
    """Starts to give every rank some rows.

    Args:
        tensor: This rank's rows, one rank's after the other's.
        sent: int64 of shape `[world_size]`: how many of them are for each rank.
        received: The same: how many each rank has for this one, as that one has told.
        collective: What it is called and checks.

    Returns:
        In flight, the rows that all ranks have for this one, in rank order; and the handle last.
    """
    inputs = {"sent": sent, "received": received, "tensor": tensor}
    return _run_start("GradringAllToAllVStart", inputs, [tensor], collective, {})


def start_reduce_scatter(tensor: tf.Tensor, collective: Collective) -> list[tf.Tensor]:
    """Starts to reduce a tensor of which each rank gets its rows, as many as `row_counts` says.

    Returns:
        The tensor in flight, of which this rank's rows are the result, and the handle last.
    """
    return _start("reduce_scatter", [tensor], collective, collective.op)


def row_counts(tensor: tf.Tensor, world_size: int) -> tf.Tensor:
    """How many rows each rank has of a tensor that is divided, as by ``numpy.array_split``."""
    rows = tf.shape(tensor, tf.int64)[0]
    ranks = tf.range(world_size, dtype=tf.int64)
    return rows // world_size + tf.cast(ranks < rows % world_size, tf.int64)


def own_rows(tensor: tf.Tensor, communicator: Communicator) -> tf.Tensor:
    """This rank's rows of a tensor that is divided."""
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
    """Runs an op that starts a collective of tensors, which are among its inputs."""
    check = collective.check
    common: dict[str, str | int] = {
        "label": collective.label.shown,
        "identity": collective.label.compared,
        "communicator": core_of(collective.communicator).id,
        "check": check.action,
        "variables": "\n".join(check.variables) if check.action else "",
        "origin": _origin(),
    }
    _check_place(collective)
    order = session_order.of_this_graph(collective.label.shown)
    inputs = {"token": _token(collective.communicator, order), **inputs}

    def run() -> list[tf.Tensor]:
        dtype, count = tensors[0].dtype, len(tensors) + 1
        with tf.device("/device:CPU:0"):
            return compat.run_op(name, inputs, dtype, attributes | common, count, unseen=True)

    return run() if order is None else session_order.make(order, run)


def wait(started: Sequence[list[tf.Tensor]]) -> list[list[tf.Tensor]]:
    """Waits for everything started, once all of it has been.

    Returns:
        The tensors of each start, without its handle.
    """
    handles = [handle for *_, handle in started]
    with tf.device("/device:CPU:0"), tf.control_dependencies(handles):
        return [
            compat.run_op(
                "GradringWait",
                {"inflight": inflight, "handle": handle},
                inflight[0].dtype,
                {},
                len(inflight),
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
        collective: What it is called and checks.

    Returns:
        The gathered tensor in flight, and the handle last.
    """
    inputs = {"counts": counts, "tensor": tensor}
    return _run_start("GradringAllGatherStart", inputs, [tensor], collective, {})


def eager_step(communicator: Communicator) -> contextlib.AbstractContextManager[None]:
    """A step of the program where it executes eagerly; in a graph, its executions are the steps."""
    return communicator.step() if tf.executing_eagerly() else contextlib.nullcontext()


def _origin() -> str:
    """What is going to execute an op that is made now."""
    if tf.executing_eagerly():
        return "eager"
    return "function" if _dataset_function() is None else "dataset"


def _check_place(collective: Collective) -> None:
    """Refuses a collective in a function of a dataset.

    Raises:
        NotImplementedError: It is to be in one.
    """
    communicator = collective.communicator
    if _dataset_function() not in (None, _LOOP_OVER_DATASET):
        raise NotImplementedError(
            f"'{collective.label.shown}' on rank {communicator.rank} of {communicator.host}: "
            "a collective in a function of a tf.data.Dataset, such as its `map`, runs whenever the "
            "dataset reads ahead, in no order with those of the training; call it in the step that "
            "gets the batch"
        )


def _token(communicator: Communicator, order: session_order.Order | None) -> tf.Tensor:
    """The handle of the communicator's ordering token, or of its graph's: a scalar resource."""
    if order is not None:
        _prepare(communicator)
        handle = order.token
        graph = tf.compat.v1.get_default_graph()
        return handle if graph is handle.graph else _capture(handle, graph)
    if communicator not in _tokens:
        _prepare(communicator)
        _tokens[communicator] = _ordering_token()
    handle = _tokens[communicator].handle
    if tf.executing_eagerly():
        return handle
    return _capture(handle, tf.compat.v1.get_default_graph())


def _capture(tensor: tf.Tensor, graph: tf.Graph) -> tf.Tensor:
    """The eager `tensor` inside the `tf.FuncGraph` that is being built.

    Branches and bodies capture it from the function that they are in: TensorFlow cannot make
    gradients of conditionals and loops that capture eager tensors of their own. So do the functions
    that are called there, before or after: ops keep their order only if they take the same tensor.
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
    """Each rank's loss depends on other ranks' inputs, so gradients go where these came from."""
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
    """The sums of all ranks' tensors, on the root; zeros on all others."""
    (sums,) = wait([_start("reduce", tensors, collective, "sum", root)])
    # Not known to TensorFlow's optimizer, which would free what follows from its order with others.
    is_root = tf.raw_ops.PlaceholderWithDefault(
        input=tf.constant(collective.communicator.rank == root), shape=[]
    )
    # All ranks go on from the reduction, so that its own derivative is every rank's.
    return [tf.where(is_root, total, tf.zeros_like(total)) for total in sums]


def _divided(tensors: list[tf.Tensor], collective: Collective) -> list[tf.Tensor]:
    """What is due of each rank's part in a sum or a mean."""
    if collective.op == "sum":
        return tensors
    return [tensor / collective.communicator.world_size for tensor in tensors]


def _all_to_all_gradients(
    upstream: Sequence[tf.Tensor], collective: Collective
) -> tuple[tf.Tensor, tf.Tensor]:
    """What comes back from where each part went; and what this rank has not received but had."""
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
    """Of the sum over all ranks' losses, this rank's rows."""
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
    """Each row's goes back to where the row came from."""
    _, sent, received, tensor = op.inputs
    if upstream is None or not upstream.dtype.is_floating:
        return [None] * 4
    part = _started(op.get_attr).part("gradient")
    started = start_all_to_all_v(tf.convert_to_tensor(upstream), received, sent, part)
    ((back,),) = wait([started])
    back.set_shape(tensor.shape)
    return [None, None, None, back]


def _start_tangents(attrs: dict[str, Any], inputs: Any, outputs: Any, tangents: Any) -> list[Any]:
    """Of a linear collective, the same of the tangents."""
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
    """Says what `tf.autodiff.ForwardAccumulator` does with an op.

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
    """The collective that an op with these attributes has started.

    Raises:
        NotImplementedError: TensorFlow cannot lead a derivative to where it is.
    """
    label = Label(_text(attr("label")), _text(attr("identity")))
    if _is_lost_in_control_flow():
        raise NotImplementedError(
            f"'{label.shown}': TensorFlow cannot lead a gradient through a collective in a "
            "tf.function that is called in a conditional or a loop, nor, under a persistent tape "
            "or for a second derivative, in a conditional or a loop inside another; call the "
            "function's python_function, or move the collective out of the conditional or loop"
        )
    return Collective(_communicator(attr("communicator")), label, op)


def _is_lost_in_control_flow() -> bool:
    """Whether what is being built is the gradient of a function that a branch or a body calls.

    TensorFlow cannot trace resources back through it. It also makes functions of conditionals and
    loops by itself, under persistent tapes and for second derivatives.
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
    """What a Start with these attributes does, its reduce op, and its root.

    What reduces nothing is as linear as a sum.
    """
    return _text(attr("collective")), _text(attr("reduce_op")) or "sum", attr("root")


def _linear(collective: Collective, derivative: str) -> Collective:
    """The same collective for derivatives.

    Raises:
        LookupError: It has none.
    """
    if collective.op not in ("sum", "mean"):
        raise LookupError(
            f"'{collective.label.shown}': no gradient is defined through {collective.op}; "
            "use sum or mean, or tf.stop_gradient"
        )
    return collective.part(derivative, collective.op)


def _communicator(number: int) -> Communicator:
    """The open communicator of this number."""
    for communicator in open_groups:
        if core_of(communicator).id == number:
            return communicator
    raise LookupError(
        "the communicator of this reduction is gone, so its gradient cannot be reduced; "
        "keep the communicator or the strategy alive"
    )


def _text(attr: bytes | str) -> str:
    return attr.decode() if isinstance(attr, bytes) else attr


def _ordering_token() -> tf.Variable:
    """A scalar resource variable outside every graph, strategy and distribution scope.

    Ops that take its handle keep their program order, also across `tf.cond` and `tf.while_loop`.
    Its name is in the error of a SavedModel that would contain such an op, and nowhere else.
    """
    return compat.plain_variable(0.0, "a_function_with_a_collective_cannot_be_exported")


def _dataset_function() -> str | None:
    """The name of the dataset's function, such as that of a `map`, of which this is traced a part.

    It is `_LOOP_OVER_DATASET` in the body of `for batch in dataset`, which is executed where it
    stands.
    """
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        name = getattr(graph, "name", None) or ""
        if name.startswith("Dataset_"):
            return name
        graph = getattr(graph, "outer_graph", None)
    return None
