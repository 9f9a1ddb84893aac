"""Buckets of gradients that are compressed together, and their kept compression errors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from gradring.gradients.reduction import Collective
from gradring.group.communicator import Communicator
from gradring.tensorflow.graph import compat
from gradring.tensorflow.graph.start_wait import wait

#: Yields tensors of started collectives, is sent the results of `wait`, and returns a vector.
Sending: TypeAlias = Generator[list[tf.Tensor], list[tf.Tensor], tf.Tensor]


class Compressor(ABC):
    """A compressed sum of buckets over all ranks."""

    def takes(self, shape: Sequence[int]) -> bool:
        """Returns whether compression makes a gradient of this shape, rank 2 or more, smaller."""
        return True

    @abstractmethod
    def reduce(self, bucket: Bucket) -> Sending:
        """Returns the sum of the bucket's vectors over all ranks, with equal bits on each."""


class Memory:
    """Variables that a bucket keeps between steps, in this process; they are not saved."""

    def __init__(self, device: str) -> None:
        """Begins empty; makes later variables on `device`."""
        self._device = device
        self._variables: dict[tuple[str, tuple[int, ...]], tf.Variable] = {}

    def of(self, name: str, shape: Sequence[int]) -> tf.Variable:
        """Returns the variable of a name and shape, zeros at first.

        Shapes depend on the group's size, so a group of another size gets other variables.
        """
        key = (name, tuple(shape))
        if key not in self._variables:
            self._variables[key] = compat.plain_variable(0, name, tf.float32, key[1], self._device)
        return self._variables[key]

    def clear(self) -> None:
        """Sets all variables to zero."""
        for variable in self._variables.values():
            variable.assign(tf.zeros_like(variable))

    def forget_gradients(self) -> None:
        """Sets all variables to zero."""
        self.clear()


class Bucket:
    """The gradients of one step that are compressed together.

    Attributes:
        vector: The gradients' elements, concatenated; float32, of static length.
        shapes: Shapes of the gradients.
        collective: Name and group of their sum.
    """

    def __init__(
        self,
        gradients: Sequence[tf.Tensor],
        collective: Collective,
        memory: Memory,
        unit: tf.Tensor | None,
    ) -> None:
        """Takes gradients of static shapes, and as `unit` the loss scale, if there is one.

        Kept values are divided by the loss scale, which may change from step to step.
        """
        self.shapes = [gradient.shape.as_list() for gradient in gradients]
        vectors = [tf.reshape(gradient, [-1]) for gradient in gradients]
        self.vector = tf.concat(vectors, 0) if len(vectors) > 1 else vectors[0]
        self.collective = collective
        self._memory = memory
        self._unit = unit

    @property
    def communicator(self) -> Communicator:
        """The group that sums the bucket."""
        return self.collective.communicator

    def kept(self, name: str, shape: Sequence[int]) -> tf.Tensor:
        """Returns the values that `keep` received in the previous step; zeros at first."""
        kept = self._memory.of(name, shape).read_value()
        return kept if self._unit is None else kept * self._unit

    def keep(self, name: str, values: tf.Tensor) -> None:
        """Keeps values, which must be finite, for the next step."""
        if self._unit is not None:
            values = values / self._unit
        self._memory.of(name, values.shape.as_list()).assign(values)

    def with_lost(self, name: str, values: tf.Tensor) -> tf.Tensor:
        """Returns the values plus the compression error of the previous step."""
        return values + self.kept(name, values.shape.as_list())

    def split(self, vector: tf.Tensor) -> list[tf.Tensor]:
        """Splits a vector into tensors of the gradients' shapes."""
        sizes = [tf.TensorShape(shape).num_elements() for shape in self.shapes]
        parts = tf.split(vector, sizes) if len(sizes) > 1 else [vector]
        return [tf.reshape(part, shape) for part, shape in zip(parts, self.shapes, strict=True)]


def finite(values: tf.Tensor) -> tf.Tensor:
    """Replaces infinities and NaNs by zeros; kept values would never lose them."""
    return tf.where(tf.math.is_finite(values), values, 0.0)


def reduce_all(buckets: Sequence[Bucket], reduce: Callable[[Bucket], Sending]) -> list[tf.Tensor]:
    """Returns the sum of each bucket; starts a phase of all buckets before it waits for any."""
    sendings = [reduce(bucket) for bucket in buckets]
    sums: list[Any] = []
    started = [next(sending) for sending in sendings]
    while started:
        ended = wait(started)
        started = []
        for sending, tensors in zip(sendings, ended, strict=True):
            try:
                started.append(sending.send(tensors))
            except StopIteration as end:
                sums.append(end.value)
    return sums
