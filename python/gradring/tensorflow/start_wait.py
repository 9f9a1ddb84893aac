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
from gradring.communicator import Communicator
from gradring.gradients.checks import NO_CHECK, Check
from gradring.gradients.names import Label
from gradring.tensorflow import compat, failures, vectorize

_tokens: weakref.WeakKeyDictionary[Communicator, Any] = weakref.WeakKeyDictionary()


def start(
    tensors: list[Any],
    communicator: Communicator,
    label: Label,
    *,
    collective: str,
    reduce_op: str = "",
    root: int = 0,
    check: Check = NO_CHECK,
) -> list[Any]:
    """The tensors in flight, and the handle last.

    Args:
      tensors: a bucket of tensors of one dtype.
      communicator: a `gradring.Communicator`.
      label: what the collective is called.
      collective: "all_reduce" or "broadcast".
      reduce_op: name of the reduce op of an all-reduce.
      root: rank whose contents win in a broadcast.
      check: what to do about tensors that are not finite.
    """
    with tf.device("/device:CPU:0"):
        return compat.run_op(
            "GradringStart",
            {"token": _token(communicator, label), "tensors": tensors},
            tensors[0].dtype,
            {
                "collective": collective,
                "reduce_op": reduce_op,
                "root": root,
                **_attributes(communicator, label, check),
            },
            len(tensors) + 1,
            unseen=True,
        )


def wait(started: Sequence[list[Any]]) -> list[list[Any]]:
    """Waits for everything started, once all of it has been."""
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


def start_all_gather(
    tensor: Any,
    counts: Any,
    communicator: Communicator,
    label: Label,
    check: Check = NO_CHECK,
) -> list[Any]:
    """The gathered tensor in flight, and the handle last.

    Args:
      tensor: this rank's rows.
      counts: int64 of shape `[world_size]`: every rank's number of rows.
      communicator: a `gradring.Communicator`.
      label: what the collective is called.
      check: what to do if the tensor is not finite.
    """
    with tf.device("/device:CPU:0"):
        return compat.run_op(
            "GradringAllGatherStart",
            {"token": _token(communicator, label), "counts": counts, "tensor": tensor},
            tensor.dtype,
            _attributes(communicator, label, check),
            2,
            unseen=True,
        )


def eager_step(communicator: Communicator) -> contextlib.AbstractContextManager[None]:
    """A step of the program where it executes eagerly; in a graph, its executions are the steps."""
    return communicator.step() if tf.executing_eagerly() else contextlib.nullcontext()


def _attributes(communicator: Communicator, label: Label, check: Check) -> dict[str, Any]:
    """What all Starts have."""
    return {
        "label": label.shown,
        "identity": label.compared,
        "communicator": communicator._native.id,
        "check": check.action,
        "variables": "\n".join(check.variables) if check.action else "",
        "origin": _origin(),
    }


def _origin() -> str:
    """What is going to execute an op that is made now."""
    if tf.executing_eagerly():
        return "eager"
    return "function" if compat.dataset_function() is None else "dataset"


def _token(communicator: Communicator, label: Label) -> Any:
    """The handle of the communicator's ordering token."""
    if compat.dataset_function() not in (None, compat.LOOP_OVER_DATASET):
        raise NotImplementedError(
            f"'{label.shown}' on rank {communicator.rank} of {communicator.host}: a collective in "
            "a function of a tf.data.Dataset, such as its `map`, runs whenever the dataset reads "
            "ahead, in no order with those of the training; call it in the step that gets the batch"
        )
    if not tf.compat.v1.executing_eagerly_outside_functions():
        raise NotImplementedError(
            "gradring works eagerly and inside tf.function, not in the graphs and sessions of "
            "TensorFlow 1; leave `tf.Graph().as_default()`, and do not disable eager execution"
        )
    if communicator not in _tokens:
        _native.tensorflow_register()
        failures.install()
        _tokens[communicator] = compat.ordering_token()
    handle = _tokens[communicator].handle
    if tf.executing_eagerly():
        return handle
    graph = tf.compat.v1.get_default_graph()
    return compat.capture(handle, graph)


@tf.RegisterGradient("GradringWait")  # type: ignore[untyped-decorator]
def _wait_gradient(_op: Any, *gradients: Any) -> list[Any]:
    return [*gradients, None]


@tf.RegisterGradient("GradringStart")  # type: ignore[untyped-decorator]
def _start_gradient(op: Any, *gradients: Any) -> list[Any]:
    """Each rank's loss depends on every rank's input, so gradients are reduced as inputs were."""
    reduce_op = _text(op.get_attr("reduce_op"))
    label, communicator = _called(op.get_attr)
    *upstream, _handle = gradients
    inputs = op.inputs[1:]
    if all(gradient is None for gradient in upstream) or not inputs[0].dtype.is_floating:
        return [None] * (1 + len(inputs))
    _check_linear(reduce_op, label)
    filled = [
        tf.zeros_like(tensor) if gradient is None else tf.convert_to_tensor(gradient)
        for tensor, gradient in zip(inputs, upstream, strict=True)
    ]
    started = start(
        filled,
        communicator,
        label.part("gradient"),
        collective="all_reduce",
        reduce_op=reduce_op,
    )
    return [None, *wait([started])[0]]


@tf.RegisterGradient("GradringAllGatherStart")  # type: ignore[untyped-decorator]
def _all_gather_gradient(op: Any, upstream: Any, _handle: Any) -> list[Any]:
    """Of the sum over all ranks' losses, this rank's rows."""
    if upstream is None or not upstream.dtype.is_floating:
        return [None, None, None]
    label, communicator = _called(op.get_attr)
    started = start(
        [tf.convert_to_tensor(upstream)],
        communicator,
        label.part("gradient"),
        collective="all_reduce",
        reduce_op="sum",
    )
    counts = op.inputs[1]
    own = tf.split(wait([started])[0][0], counts, num=communicator.world_size)[communicator.rank]
    return [None, None, own]


def _start_tangents(attrs: dict[str, Any], inputs: Any, outputs: Any, tangents: Any) -> list[Any]:
    """Of a linear collective, the same of the tangents."""
    reduce_op = _text(attrs["reduce_op"])
    label, communicator = _called(attrs.__getitem__)
    if not inputs[1].dtype.is_floating:
        return [None] * len(outputs)
    _check_linear(reduce_op, label)
    started = start(
        list(tangents[1:]),
        communicator,
        label.part("tangent"),
        collective="all_reduce",
        reduce_op=reduce_op,
    )
    return [*wait([started])[0], None]


def _all_gather_tangents(
    attrs: dict[str, Any], inputs: Any, outputs: Any, tangents: Any
) -> list[Any]:
    if not inputs[2].dtype.is_floating:
        return [None] * len(outputs)
    label, communicator = _called(attrs.__getitem__)
    started = start_all_gather(tangents[2], inputs[1], communicator, label.part("tangent"))
    return [*wait([started])[0], None]


compat.register_tangents("GradringStart", _start_tangents)
compat.register_tangents("GradringAllGatherStart", _all_gather_tangents)
vectorize.register()


def _called(attr: Callable[[str], Any]) -> tuple[Label, Communicator]:
    """What the collective with these attributes is called, and where it ran.

    Raises:
      NotImplementedError: TensorFlow cannot lead a derivative to where it is.
    """
    label = Label(_text(attr("label")), _text(attr("identity")))
    if compat.is_lost_in_control_flow():
        raise NotImplementedError(
            f"'{label.shown}': TensorFlow cannot lead a gradient through a collective in a "
            "tf.function that is called in a conditional or a loop, nor, under a persistent tape "
            "or for a second derivative, in a conditional or a loop inside another; call the "
            "function's python_function, or move the collective out of the conditional or loop"
        )
    return label, _communicator(attr("communicator"))


def _check_linear(reduce_op: str, label: Label) -> None:
    if reduce_op not in ("sum", "mean"):
        raise LookupError(
            f"'{label.shown}': no gradient is defined through {reduce_op or 'broadcast'}; "
            "use sum or mean, or tf.stop_gradient"
        )


def _communicator(number: int) -> Communicator:
    """The communicator of this number; one that has started something has a token."""
    for communicator in list(_tokens):
        if communicator._native.id == number:
            return communicator
    raise LookupError(
        "the communicator of this reduction is gone, so its gradient cannot be reduced; "
        "keep the communicator or the strategy alive"
    )


def _text(attr: bytes | str) -> str:
    return attr.decode() if isinstance(attr, bytes) else attr
