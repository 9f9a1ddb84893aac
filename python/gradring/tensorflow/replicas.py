"""Comparison of the ranks' variables."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import numpy as np
import tensorflow as tf

from gradring.errors import MismatchError
from gradring.gradients.names import name_of
from gradring.gradients.replicas import check_equal, hash_of
from gradring.group.communicator import Communicator
from gradring.group.require_equal import gather_if_different
from gradring.tensorflow.graph import apart
from gradring.tensorflow.graph.adoption import of_tensorflow
from gradring.tensorflow.graph.fallback import falls_back
from gradring.tensorflow.graph.model_variables import variables_of
from gradring.tensorflow.graph.ops import group_of
from gradring.tensorflow.graph.own_assignments import is_assigned_alone
from gradring.tensorflow.graph.reduction import Variable
from gradring.tensorflow.graph.replica_step import id_of
from gradring.tensorflow.rules.replicas import rule_of

_logger = logging.getLogger("gradring")


def check_replicas(
    model: tf.keras.Model | tf.train.Checkpoint | tf.Module | Iterable[Variable],
    communicator: Communicator | None = None,
) -> None:
    """Compares variables that must have the same bits on every rank.

    Every rank must call it, eagerly and between two steps. It hashes the variables (BLAKE2b) and
    compares a digest of all, in a reduction of 48 bytes; only if ranks differ, 8 bytes of each
    variable.

    Args:
        model: A Keras model, with its optimizers; a checkpoint or module;
            or `tf.Variable`s or Keras variables of any shapes. The same on every rank. Variables
            that every replica has for itself until they are read (`ON_READ`, such as metrics, or
            moving statistics that are not synchronised) are left out, and so are the sums of
            `gradient_accumulation_steps`, which are reduced when they are complete, and the state
            of optimizers under `gradring.updates.LocalSGD`. It calls `sync_replicas`.
        communicator: As for `all_reduce`.

    Raises:
        gradring.errors.MismatchError: On every rank; names the first variable that differs, and the
            ranks on which it differs from most. The group stays usable.

    Examples:
        >>> weights = tf.Variable([1.0, 2.0], name="weights")
        >>> gradring.tensorflow.check_replicas([weights])
        >>> if rank == 1:
        ...     weights.assign([1.0, 2.5])
        >>> gradring.tensorflow.check_replicas([weights])
        Traceback (most recent call last):
            ...
        gradring.errors.MismatchError: variables: the replicas differ. '0/weights' is the ...
    """
    comm = group_of(communicator)
    arrays = {}
    variables = list(variables_of(model) if _is_model(model) else model)
    rule_of(variables).sync(variables)
    for index, variable in _common(variables):
        arrays[f"{index}/{name_of(variable)}"] = contents(variable)
    check_equal(comm, arrays, "variables")


@falls_back("the comparison of the weights with which ranks begin", "they are not compared")
def warn_of_unlike_beginnings(variables: Iterable[Variable], communicator: Communicator) -> None:
    """Says on every rank that they begin to train with different weights, if they do.

    All ranks call it in their first step, also while a `tf.function` is traced. In an elastic job,
    which gives a rank that joins the others' weights, it does nothing.

    Raises:
        gradring.errors.MismatchError: They do, in the group of a strict strategy.
    """
    if communicator.world_size == 1 or communicator.generation > 0:
        return
    try:
        with tf.init_scope():
            check_replicas(variables, communicator)
    except tf.errors.FailedPreconditionError:  # they get their values in this very step
        pass
    except MismatchError as error:
        if apart.is_strict(communicator):
            raise
        _logger.warning(
            "rank %d of %d begins to train with weights that are not those of the others: make the "
            "variables inside of `with strategy.scope():`, or call "
            "gradring.tensorflow.broadcast_variables(model.variables) before the first step (%s)",
            communicator.rank,
            communicator.world_size,
            error,
        )


def unlike(
    variables: Iterable[Variable],
    communicator: Communicator,
    weights: Iterable[Variable],
    assigned: Iterable[Variable] = (),
) -> tuple[list[str], list[str]]:
    """Names of variables that differ now, of those that each rank may have assigned by itself.

    Every rank must call it, between two steps, and gets the same answer. Integers are left out:
    counters, which are assigned in that way and may differ.

    Args:
        variables: All of a model. Those that replicas have assigned in a step are compared.
        communicator: The ranks.
        weights: Some of them, which are compared in any case.
        assigned: Some of them that steps may assign without TensorFlow's noting it, likewise.

    Returns:
        What replicas have assigned, and what differs of the weights beside.
    """
    unnoted = {id(variable) for variable in assigned}
    parts: dict[str, tuple[Variable, Any]] = {}
    own: dict[str, int] | None = None
    with _optional():
        compared_too = {id(weight) for weight in weights} | unnoted
        parts = {
            str(index): (variable, part)
            for index, variable in _common(list(variables))
            if not (part := of_tensorflow(variable)).dtype.is_integer
        }
        own = _hashes(
            {
                index: variable
                for index, (variable, part) in parts.items()
                if id(variable) in compared_too or is_assigned_alone(part)
            }
        )
    found = _of_all(own, communicator)
    # One rank alone may have assigned some, as the chief does by `gradring.updates.Primary`.
    if None not in found and any(theirs.keys() != found[0].keys() for theirs in found):
        chosen, own = set().union(*found), None
        with _optional():
            own = _hashes({i: variable for i, (variable, _) in parts.items() if i in chosen})
        found = _of_all(own, communicator)
    if own is None or None in found:
        return [], []
    by_steps: list[str] = []
    beside: list[str] = []
    for index, digest in own.items():
        if any(theirs.get(index) != digest for theirs in found):
            variable, part = parts[index]
            is_by_step = id(variable) in unnoted or is_assigned_alone(part)
            (by_steps if is_by_step else beside).append(name_of(variable))
    return by_steps, beside


def _optional() -> contextlib.AbstractContextManager[None]:
    return falls_back("the comparison of what replicas assign", "it is not compared")


def _hashes(variables: Mapping[str, Variable]) -> dict[str, int]:
    return {index: hash_of(contents(variable)) for index, variable in variables.items()}


def _of_all(own: dict[str, int] | None, communicator: Communicator) -> list[Any]:
    """What each rank has, or an empty list where all have the same; every rank must call it."""
    name = "variables that replicas assign"
    texts = gather_if_different(communicator, json.dumps(own).encode(), name)
    return [json.loads(text) for text in texts or ()]


def _common(variables: list[Variable]) -> Iterator[tuple[int, Variable]]:
    """Those of the variables, with their places, that all ranks have in common after a `sync`."""
    unsynchronised = {id_of(variable) for variable in rule_of(variables).unsynchronised()}
    for index, variable in enumerate(variables):
        if id_of(variable) not in unsynchronised and not _is_own(variable):
            yield index, variable


def contents(variable: Variable) -> np.ndarray[Any, Any]:
    """What is compared of it: strings as bytes."""
    value = tf.convert_to_tensor(of_tensorflow(variable))
    if value.dtype == tf.string:
        value = tf.io.decode_raw(tf.io.serialize_tensor(value), tf.uint8)
    return cast("np.ndarray[Any, Any]", value.numpy())


def _is_model(model: Any) -> bool:
    return hasattr(model, "load_weights") or isinstance(model, tf.train.Checkpoint | tf.Module)


def _is_own(variable: Variable) -> bool:
    """Whether every replica has it for itself, for a while."""
    on_read = tf.VariableSynchronization.ON_READ
    return (
        getattr(of_tensorflow(variable), "synchronization", None) == on_read
        # What Keras calls it has no other sign.
        or name_of(variable).endswith("_gradient_accumulator")
    )
