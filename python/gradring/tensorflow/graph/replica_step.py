"""State of a replica's current step.

`CustomCollectiveStrategy.run` makes a `ReplicaStep` for each call of a replica's function. The
modules of this package share facts about the step through its fields. Outside of `run`, one step
lasts as long as the process.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import tensorflow as tf

from gradring.tensorflow.seams import keras_names


class Reductions:
    """Values that a step has reduced over the ranks, up to the point of its trace or execution."""

    def __init__(self) -> None:
        """Makes an empty record."""
        self._variables: set[int] = set()
        #: `_size` of tensors of any shape: a program can reshape its gradients.
        self._sizes: set[int] = set()
        #: Shapes of the rows of `tf.IndexedSlices`.
        self._rows: set[tuple[int, ...]] = set()
        #: Elements of the largest vector: a program can pack its gradients into one.
        self._largest = 0.0

    def note_gradients(self, variables: Iterable[Any]) -> None:
        """Records that gradients of these variables were reduced."""
        self._variables.update(id_of(variable) for variable in variables)

    def note_values(self, values: Iterable[Any]) -> None:
        """Records reduced tensors that may be gradients: those of floating types."""
        for value in values:
            if not value.dtype.is_floating:
                continue  # a count
            if isinstance(value, tf.IndexedSlices):
                self._rows.add(_dimensions(value.values.shape)[1:])
            elif value.shape.is_fully_defined() and not _is_vector(value.shape):
                self._sizes.add(_size(value.shape))
            else:
                self.note_packed(value)

    def note_packed(self, value: tf.Tensor) -> None:
        """Records a reduced, gathered or scattered tensor that may contain several gradients."""
        is_known = value.shape.is_fully_defined()
        self._largest = max(self._largest, value.shape.num_elements() if is_known else math.inf)

    def has_gradient_of(self, variable: Any) -> bool:
        """Returns whether a gradient of this variable was reduced for certain."""
        return id_of(variable) in self._variables

    def cover(self, variable: Any) -> bool:
        """Returns whether a reduced tensor can be, or contain, the variable's gradient."""
        if self.has_gradient_of(variable):
            return True
        shape = tf.TensorShape(variable.shape)
        if not shape.is_fully_defined():
            return bool(self._sizes or self._rows or self._largest)
        is_of_rows = shape.rank > 0 and _dimensions(shape)[1:] in self._rows
        is_in_one = shape.num_elements() <= self._largest
        return is_of_rows or is_in_one or _size(shape) in self._sizes


def _size(shape: tf.TensorShape) -> int:
    """Returns the number of elements; 0 for a scalar, so a loss only covers scalar variables."""
    return int(shape.num_elements()) if shape.rank else 0


def _is_vector(shape: tf.TensorShape) -> bool:
    """Returns whether at most one dimension of a shape differs from 1; False for scalars."""
    return bool(shape.rank and max(_dimensions(shape)) == shape.num_elements())


def _dimensions(shape: Any) -> tuple[int, ...]:
    """Returns a shape as numbers, with TensorFlow 1's `Dimension` objects as well."""
    shape = tf.TensorShape(shape)
    return () if shape.rank is None else tuple(shape.as_list())


class Gradients(NamedTuple):
    """Variables of the gradients that are being reduced."""

    #: One variable for each gradient.
    variables: Sequence[Any]
    #: All variables of the optimizer, including those without a gradient.
    among: Sequence[Any]


class Share(NamedTuple):
    """A replica's part of the samples of all replicas."""

    #: Share times the number of replicas: 1.0 is an equal part.
    ratio: tf.Tensor
    #: True if all parts are equal in all steps.
    is_equal: bool
    #: True if the shapes of this rank's tensors are those of every rank's tensors.
    has_equal_shapes: bool


class Normalised(NamedTuple):
    """A call of a layer of batch normalisation."""

    #: True if the batch had no samples.
    is_empty: bool | tf.Tensor
    #: Values of the moving statistics before the call; empty if the batch has samples for sure.
    before: Sequence[tf.Tensor]


@dataclass(frozen=True)
class ReplicaStep:
    """State of the step, or of the part of the step that runs now."""

    #: True in a step of `run`; False in the code around the steps.
    is_in_run: bool = False
    #: The graph in which the step was begun; None outside of graphs.
    graph: tf.Graph | None = None
    #: Layers of batch normalisation, each with its only call, which is in that graph.
    normalised: dict[Any, Normalised] = field(default_factory=dict)
    #: Arguments of the enclosing `cross_device_ops.gradients_of`.
    gradients_of: Gradients | None = None
    #: True if reductions return this rank's own sums.
    is_alone: bool = False
    #: True if the optimizer's gradients are already the sums over all replicas.
    has_sums: bool = False
    #: True while an update rule of the strategy applies gradients.
    is_applying: bool = False
    #: Values that were reduced in this step.
    reductions: Reductions = field(default_factory=Reductions)
    #: Variables of the strategy that optimizers assigned, each with its optimizer, and with the
    #: number of the optimizer's updates before, if it accumulates gradients.
    assigned: list[tuple[Any, Any, int | None]] = field(default_factory=list)
    #: Not empty once Keras has computed a loss in this step.
    keras_losses: list[bool] = field(default_factory=list)
    #: True in layers if the outermost layer got an empty batch; None outside of layers.
    is_empty: bool | tf.Tensor | None = None
    #: The replica's part of the samples, in a step of Keras.
    share: Share | None = None
    #: The mask of the loss that Keras computes.
    mask: Any = None
    #: Divisor of Keras' mean of that loss; None if it grows with the number of samples only.
    divisor: tf.Tensor | None = None
    #: Tensors with a row for each sample of the replica, in a step of Keras.
    batch: list[Any] = field(default_factory=list)
    #: True if each replica has the whole batch; only in a program that knows of no replicas.
    has_whole_batch: bool = False
    #: Means by the program's own code that it does not divide by the number of replicas.
    own_means: list[Any] = field(default_factory=list)
    #: Values that are this rank's part of a mean; only in a program that knows of no replicas.
    means: list[Any] = field(default_factory=list)
    #: Quotients of sums over all ranks, by the keys of this rank's quotients.
    quotients: dict[Any, Any] = field(default_factory=dict)
    #: Tensors with a row for each sample, each with the tensor of the batch that it was made of.
    filled: list[tuple[Any, Any]] = field(default_factory=list)
    #: True while one rank's assignments reach the others by a broadcast.
    is_broadcast: bool = False


_outside = ReplicaStep()
_current: ContextVar[ReplicaStep] = ContextVar("step", default=_outside)


def current() -> ReplicaStep:
    """Returns the step of this replica, or the process-wide state outside of steps."""
    return _current.get()


def is_outside() -> bool:
    """Returns whether the program's own code runs now, outside of steps and of update rules."""
    step = current()
    return not (step.is_in_run or step.is_applying or step.is_alone)


def reductions() -> Sequence[Reductions]:
    """Returns the reductions of the current step, and those outside of steps."""
    step = current()
    return (step.reductions, _outside.reductions) if step.is_in_run else (_outside.reductions,)


def note_reduced(results: Sequence[Any], variables: Sequence[Any]) -> None:
    """Records reduced tensors, in the current step or for all steps.

    A reduction by a Keras optimizer counts for this step alone. A reduction by the program counts
    for all later steps, too: the program can apply the result later, or reduce in a function that
    is not traced again.

    Args:
        results: The reduced tensors.
        variables: The variables of these gradients; empty if it is unknown which they are.
    """
    by_keras = current().gradients_of
    for each in reductions() if by_keras is None else (current().reductions,):
        if variables:
            # An optimizer can also assign variables without a gradient, to decay or clip them.
            each.note_gradients([*variables, *(by_keras.among if by_keras else ())])
        else:
            each.note_values(results)


@contextlib.contextmanager
def beginning() -> Iterator[ReplicaStep]:
    """Begins a new step of a replica, which lasts as long as the block."""
    new = replace(
        current(),
        is_in_run=True,
        graph=None if tf.executing_eagerly() else tf.compat.v1.get_default_graph(),
        normalised={},
        reductions=Reductions(),
        assigned=[],
        keras_losses=[],
        own_means=[],
        means=[],
        quotients={},
        filled=[],
    )
    with _being(new) as step:
        yield step


@contextlib.contextmanager
def holding(**fields: Any) -> Iterator[None]:
    """Sets these fields of the current step while the block runs."""
    with _being(replace(current(), **fields)):
        yield


@contextlib.contextmanager
def _being(step: ReplicaStep) -> Iterator[ReplicaStep]:
    token = _current.set(step)
    try:
        yield step
    finally:
        _current.reset(token)


def id_of(variable: Any) -> int:
    """Returns an id that a TensorFlow variable and its Keras wrapper have in common."""
    return id(keras_names.VALUE.of(variable, variable))
