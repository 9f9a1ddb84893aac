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

    Every rank must call it, eagerly and between two steps. It calls `sync_replicas`, hashes the
    variables (BLAKE2b), and compares one digest of all variables in a reduction of 48 bytes. If the
    digests differ, it compares 8 bytes for each variable.

    Some variables are left out. Variables that each replica keeps for itself until they are read
    (`ON_READ`) may differ, such as metrics, or moving statistics that are not synchronised. The
    same holds for incomplete sums of `gradient_accumulation_steps`, which are reduced later, and
    for optimizer state under `gradring.updates.LocalSGD`.

    Args:
        model: A Keras model, with its optimizers; a checkpoint or module;
            or `tf.Variable`s or Keras variables of any shapes. The same on every rank.
        communicator: As for `all_reduce`.

    Raises:
        gradring.errors.MismatchError: On every rank; names the first variable that differs, and the
            ranks whose values differ from those of most ranks. The group stays usable.

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


def compare_beginnings(variables: Iterable[Variable], communicator: Communicator) -> bool:
    """Warns on every rank if the ranks begin to train with different weights.

    All ranks call it in their first step, also while a `tf.function` is traced. It does nothing
    once an elastic job has formed a new group, because a joining rank gets the others' weights.

    Returns:
        False if the variables have no values yet, because this step makes them; all ranks are to
        call it again.

    Raises:
        gradring.errors.MismatchError: The weights differ, in the group of a strict strategy.
    """
    if communicator.world_size == 1 or communicator.generation > 0:
        return True
    with falls_back(
        "the comparison of the weights with which ranks begin", "they are not compared"
    ):
        return _compare_beginnings(variables, communicator)
    return True


def _compare_beginnings(variables: Iterable[Variable], communicator: Communicator) -> bool:
    variables = list(variables)
    try:
        with tf.init_scope():
            # A function that makes variables is traced twice, first without their values.
            if not all(of_tensorflow(variable).is_initialized() for variable in variables):
                return False
            check_replicas(variables, communicator)
    except MismatchError as error:
        if apart.is_strict(communicator):
            raise
        _logger.warning(
            "rank %d of %d begins to train with weights that differ from the other ranks'; make "
            "the variables inside of `with strategy.scope():`, or call "
            "gradring.tensorflow.broadcast_variables(model.variables) before the first step (%s)",
            communicator.rank,
            communicator.world_size,
            error,
        )
    return True


def unlike(
    variables: Iterable[Variable],
    communicator: Communicator,
    weights: Iterable[Variable],
    assigned: Iterable[Variable] = (),
) -> tuple[list[str], list[str]]:
    """Returns the names of variables that differ between ranks, as far as they are compared.

    Every rank must call it between two steps, and gets the same answer. Integer variables are left
    out, because counters may differ.

    Args:
        variables: All variables of a model. Those that replicas have assigned in a step are
            compared.
        communicator: The group of the ranks.
        weights: Variables of the model that are compared in any case.
        assigned: Variables of the model that steps may assign unrecorded; they are also compared.

    Returns:
        Names of differing variables that replicas have assigned in steps, and names of the others.
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
    # One rank may have assigned other variables than the others, as the chief under `Primary`.
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
    """Returns every rank's hashes, or an empty list if all are equal; every rank must call it."""
    name = "variables that replicas assign"
    texts = gather_if_different(communicator, json.dumps(own).encode(), name)
    return [json.loads(text) for text in texts or ()]


def _common(variables: list[Variable]) -> Iterator[tuple[int, Variable]]:
    """Yields the variables that are equal on all ranks after a `sync`, with their indices."""
    unsynchronised = {id_of(variable) for variable in rule_of(variables).unsynchronised()}
    for index, variable in enumerate(variables):
        if id_of(variable) not in unsynchronised and not _is_own(variable):
            yield index, variable


def contents(variable: Variable) -> np.ndarray[Any, Any]:
    """Returns a variable's value for a comparison; strings as bytes."""
    value = tf.convert_to_tensor(of_tensorflow(variable))
    if value.dtype == tf.string:
        value = tf.io.decode_raw(tf.io.serialize_tensor(value), tf.uint8)
    return cast("np.ndarray[Any, Any]", value.numpy())


def _is_model(model: Any) -> bool:
    return hasattr(model, "load_weights") or isinstance(model, tf.train.Checkpoint | tf.Module)


def _is_own(variable: Variable) -> bool:
    """Returns whether each replica keeps its own value of a variable for some steps."""
    on_read = tf.VariableSynchronization.ON_READ
    return (
        getattr(of_tensorflow(variable), "synchronization", None) == on_read
        # Keras marks the sums of accumulated gradients only by their names.
        or name_of(variable).endswith("_gradient_accumulator")
    )
