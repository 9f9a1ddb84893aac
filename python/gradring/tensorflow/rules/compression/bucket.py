"""Gradients that are compressed together, and what they have lost."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from gradring.gradients.reduction import Collective
from gradring.group.communicator import Communicator
from gradring.tensorflow.graph import compat
from gradring.tensorflow.graph.start_wait import wait

#: Yields what it has started, is sent what a wait gives, and returns a vector.
Sending: TypeAlias = Generator[list[tf.Tensor], list[tf.Tensor], tf.Tensor]


class Compressor(ABC):
    """A way to add up the gradients of buckets over all ranks."""

    def takes(self, shape: Sequence[int]) -> bool:
        """Whether a gradient of this shape, of two dimensions or more, gets smaller."""
        return True

    @abstractmethod
    def reduce(self, bucket: Bucket) -> Sending:
        """The sum of the bucket's vectors over all ranks, the same bits on each."""


class Memory:
    """What a bucket keeps from one step for the next, for this process; it is not saved."""

    def __init__(self, device: str) -> None:
        """Nothing is kept yet."""
        self._device = device
        self._variables: dict[tuple[str, tuple[int, ...]], tf.Variable] = {}

    def of(self, name: str, shape: Sequence[int]) -> tf.Variable:
        """Zeros at first. In a group of another size, shapes are others, and so are variables."""
        key = (name, tuple(shape))
        if key not in self._variables:
            self._variables[key] = compat.plain_variable(0, name, tf.float32, key[1], self._device)
        return self._variables[key]

    def clear(self) -> None:
        """Forgets."""
        for variable in self._variables.values():
            variable.assign(tf.zeros_like(variable))


class Bucket:
    """The gradients of one step that are compressed together.

    Attributes:
        vector: Their elements, one gradient after the other; float32, of known length.
        shapes: Of the gradients.
        collective: What their sum is called.
    """

    def __init__(
        self,
        gradients: Sequence[tf.Tensor],
        collective: Collective,
        memory: Memory,
        unit: tf.Tensor | None,
    ) -> None:
        """Takes gradients of known shapes, and the scale of their loss, if it has one."""
        self.shapes = [gradient.shape.as_list() for gradient in gradients]
        vectors = [tf.reshape(gradient, [-1]) for gradient in gradients]
        self.vector = tf.concat(vectors, 0) if len(vectors) > 1 else vectors[0]
        self.collective = collective
        self._memory = memory
        self._unit = unit

    @property
    def communicator(self) -> Communicator:
        """The group."""
        return self.collective.communicator

    def kept(self, name: str, shape: Sequence[int]) -> tf.Tensor:
        """What `keep` was given in the step before; zeros at first."""
        kept = self._memory.of(name, shape).read_value()
        return kept if self._unit is None else kept * self._unit

    def keep(self, name: str, values: tf.Tensor) -> None:
        """Remembers values, which must be finite, for the next step."""
        if self._unit is not None:
            values = values / self._unit
        self._memory.of(name, values.shape.as_list()).assign(values)

    def with_lost(self, name: str, values: tf.Tensor) -> tf.Tensor:
        """The values, and what was kept of those before because it was lost."""
        return values + self.kept(name, values.shape.as_list())

    def split(self, vector: tf.Tensor) -> list[tf.Tensor]:
        """A vector as tensors of the shapes of the gradients."""
        sizes = [tf.TensorShape(shape).num_elements() for shape in self.shapes]
        parts = tf.split(vector, sizes) if len(sizes) > 1 else [vector]
        return [tf.reshape(part, shape) for part, shape in zip(parts, self.shapes, strict=True)]


def finite(values: tf.Tensor) -> tf.Tensor:
    """Zeros in place of infinities and NaNs, which would stay for ever."""
    return tf.where(tf.math.is_finite(values), values, 0.0)


def reduce_all(buckets: Sequence[Bucket], reduce: Callable[[Bucket], Sending]) -> list[tf.Tensor]:
    """The sum of each bucket; each phase of all is started before it is waited for."""
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
