"""The state of the step that a replica does.

`CustomCollectiveStrategy.run` makes a `ReplicaStep` for each call of a replica's function. What the
modules of this package tell each other about that step is a field of it. Outside of `run`, one step
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
    """What was reduced over the ranks in a step, as far as the program was traced or executed."""

    def __init__(self) -> None:
        """Nothing was reduced."""
        self._variables: set[int] = set()
        #: `_size` of tensors of any shape: a program may have reshaped its gradients.
        self._sizes: set[int] = set()
        #: Shapes of the rows of `tf.IndexedSlices`.
        self._rows: set[tuple[int, ...]] = set()
        #: Elements of the largest vector, in which a program may have packed its gradients.
        self._largest = 0.0

    def note_gradients(self, variables: Iterable[Any]) -> None:
        """Gradients of these variables were reduced."""
        self._variables.update(id_of(variable) for variable in variables)

    def note_values(self, values: Iterable[Any]) -> None:
        """Tensors were reduced, and nobody said whether they are gradients, which are floating."""
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
        """A tensor was reduced, gathered or scattered that may consist of several gradients."""
        is_known = value.shape.is_fully_defined()
        self._largest = max(self._largest, value.shape.num_elements() if is_known else math.inf)

    def has_gradient_of(self, variable: Any) -> bool:
        """Whether the gradient of a variable is known to be among what was reduced."""
        return id_of(variable) in self._variables

    def cover(self, variable: Any) -> bool:
        """Whether the gradient of a variable may be among what was reduced."""
        if self.has_gradient_of(variable):
            return True
        shape = tf.TensorShape(variable.shape)
        if not shape.is_fully_defined():
            return bool(self._sizes or self._rows or self._largest)
        is_of_rows = shape.rank > 0 and _dimensions(shape)[1:] in self._rows
        is_in_one = shape.num_elements() <= self._largest
        return is_of_rows or is_in_one or _size(shape) in self._sizes


def _size(shape: tf.TensorShape) -> int:
    """The number of elements; 0 of a scalar, such as a loss, which is no gradient of others."""
    return int(shape.num_elements()) if shape.rank else 0


def _is_vector(shape: tf.TensorShape) -> bool:
    """Whether a shape has one dimension, beside those of one element."""
    return bool(shape.rank and max(_dimensions(shape)) == shape.num_elements())


def _dimensions(shape: Any) -> tuple[int, ...]:
    """A shape as numbers, in TensorFlow 1's way of shapes too."""
    shape = tf.TensorShape(shape)
    return () if shape.rank is None else tuple(shape.as_list())


class Gradients(NamedTuple):
    """Of what the gradients are that are reduced now."""

    #: As many as gradients.
    variables: Sequence[Any]
    #: All of their optimizer, of which some may have no gradient.
    among: Sequence[Any]


class Share(NamedTuple):
    """A replica's part of the samples of all replicas."""

    #: 1.0 is an equal part.
    size: tf.Tensor
    #: Whether it is an equal one in all steps.
    is_equal: bool
    #: Whether shapes say on every rank what they say on this one.
    has_equal_shapes: bool


@dataclass(frozen=True)
class ReplicaStep:
    """State of the step, or of the part of it that runs now."""

    #: Whether this is a step of `run`, and not what surrounds the steps.
    is_in_run: bool = False
    #: What `gradients_of` was given.
    gradients_of: Gradients | None = None
    #: Whether reductions give this rank's own sums.
    is_alone: bool = False
    #: Whether the gradients that an optimizer applies are the sums over all replicas already.
    has_sums: bool = False
    #: Whether an update rule other than that of the optimizer applies gradients.
    is_applying: bool = False
    #: What was reduced in it.
    reductions: Reductions = field(default_factory=Reductions)
    #: Variables of the strategy that optimizers assigned, each with its optimizer.
    assigned: list[tuple[Any, Any]] = field(default_factory=list)
    #: Has an element once a loss of Keras was computed in it.
    keras_losses: list[bool] = field(default_factory=list)
    #: None outside of layers; inside, whether the outermost one got an empty batch.
    is_empty: bool | tf.Tensor | None = None
    #: The replica's part of the samples, in a step of Keras.
    share: Share | None = None
    #: The mask of the loss that Keras computes.
    mask: Any = None
    #: What that loss is divided by; None is what grows with the number of samples alone.
    divisor: tf.Tensor | None = None
    #: Tensors with a row for each sample of the replica, in a step of Keras.
    batch: list[Any] = field(default_factory=list)
    #: Whether each replica has the whole batch of a program that knows of no replicas.
    has_whole_batch: bool = False
    #: Losses that are means of the program's own, which nothing divides by the number of replicas.
    own_means: list[Any] = field(default_factory=list)
    #: Of a program that knows of no replicas: what is a mean over the samples, as its parts are.
    means: list[Any] = field(default_factory=list)
    #: Whether what one rank assigns reaches the others by a broadcast.
    is_broadcast: bool = False


_outside = ReplicaStep()
_current: ContextVar[ReplicaStep] = ContextVar("step", default=_outside)


def current() -> ReplicaStep:
    """The step of this replica, or what lasts as long as the process."""
    return _current.get()


def reductions() -> Sequence[Reductions]:
    """Those of the current step, and those outside of steps."""
    step = current()
    return (step.reductions, _outside.reductions) if step.is_in_run else (_outside.reductions,)


def note_reduced(results: Sequence[Any], variables: Sequence[Any]) -> None:
    """Tensors were reduced, which are gradients of these variables; without any, nobody said so.

    What an optimizer of Keras has reduced is for this step alone. A program may apply what it has
    reduced by itself in a later step, or reduce by a function that is not traced again.
    """
    by_keras = current().gradients_of
    for each in reductions() if by_keras is None else (current().reductions,):
        if variables:
            # An optimizer may assign those without a gradient as well, to decay or clip them.
            each.note_gradients([*variables, *(by_keras.among if by_keras else ())])
        else:
            each.note_values(results)


@contextlib.contextmanager
def beginning() -> Iterator[ReplicaStep]:
    """Inside is a new step of a replica."""
    new = replace(
        current(),
        is_in_run=True,
        reductions=Reductions(),
        assigned=[],
        keras_losses=[],
        own_means=[],
        means=[],
    )
    with _being(new) as step:
        yield step


@contextlib.contextmanager
def holding(**fields: Any) -> Iterator[None]:
    """Inside, the current step has these fields."""
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
    """The same for a variable of TensorFlow and for what Keras wraps around it."""
    return id(keras_names.VALUE.of(variable, variable))
