"""The Start and Wait ops, their ordering token and their gradients.

Start hands tensors to gradring's engine and returns at once; Wait blocks until they are done. The
tensors in between belong to the engine and are read by nothing but their Wait.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from gradring import _native
from gradring.communicator import Communicator
from gradring.tensorflow import compat
from gradring.tensorflow.gradient_check import NO_CHECK, Check
from gradring.tensorflow.naming import Label

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
            {"token": _token(communicator), "tensors": tensors},
            tensors[0].dtype,
            {
                "collective": collective,
                "reduce_op": reduce_op,
                "root": root,
                **_attributes(communicator, label, check),
            },
            len(tensors) + 1,
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
            {"token": _token(communicator), "counts": counts, "tensor": tensor},
            tensor.dtype,
            _attributes(communicator, label, check),
            2,
        )


def _attributes(communicator: Communicator, label: Label, check: Check) -> dict[str, Any]:
    """What all Starts have."""
    return {
        "label": label.shown,
        "identity": label.compared,
        "communicator": communicator._native.id,
        "check": check.action,
        "variables": "\n".join(check.variables) if check.action else "",
    }


def _token(communicator: Communicator) -> Any:
    """The handle of the communicator's ordering token."""
    if not tf.compat.v1.executing_eagerly_outside_functions():
        raise NotImplementedError(
            "gradring works eagerly and inside tf.function, not in the graphs and sessions of "
            "TensorFlow 1; leave `tf.Graph().as_default()`, and do not disable eager execution"
        )
    if communicator not in _tokens:
        _native.tensorflow_register()
        _tokens[communicator] = compat.ordering_token()
    return _tokens[communicator].handle


@tf.RegisterGradient("GradringWait")  # type: ignore[untyped-decorator]
def _wait_gradient(_op: Any, *gradients: Any) -> list[Any]:
    return [*gradients, None]


@tf.RegisterGradient("GradringStart")  # type: ignore[untyped-decorator]
def _start_gradient(op: Any, *gradients: Any) -> list[Any]:
    """Each rank's loss depends on every rank's input, so gradients are reduced as inputs were."""
    reduce_op = _text(op.get_attr("reduce_op"))
    label = Label(_text(op.get_attr("label")), _text(op.get_attr("identity")))
    *upstream, _handle = gradients
    inputs = op.inputs[1:]
    if all(gradient is None for gradient in upstream) or not inputs[0].dtype.is_floating:
        return [None] * (1 + len(inputs))
    if reduce_op not in ("sum", "mean"):
        raise LookupError(
            f"'{label.shown}': no gradient is defined through {reduce_op or 'broadcast'}; "
            "use sum or mean, or tf.stop_gradient"
        )
    filled = [
        tf.zeros_like(tensor) if gradient is None else tf.convert_to_tensor(gradient)
        for tensor, gradient in zip(inputs, upstream, strict=True)
    ]
    started = start(
        filled,
        _communicator(op.get_attr("communicator")),
        label.part("gradient"),
        collective="all_reduce",
        reduce_op=reduce_op,
    )
    return [None, *wait([started])[0]]


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
