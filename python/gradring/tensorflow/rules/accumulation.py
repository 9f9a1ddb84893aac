"""``sync_every``: gradients of several steps are added up before another rule has their mean.

Keras' `gradient_accumulation_steps` does so too, and also reduces in every k-th step only. But it
counts every step, so that schedules of the learning rate run k times as fast as with batches of k
times the size, and moving averages of weights move in every step; here, an optimizer sees nothing
of the steps in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from gradring.tensorflow.rules.updates import (
    Apply,
    Gradient,
    Round,
    Updates,
    UpdatesInRounds,
    beside,
    when,
)


class _Sums(Round):
    """What the steps of a round have added up."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self._sums: dict[int, tf.Variable] = {}

    def of(self, variable: Any) -> tf.Variable:
        if id(variable) not in self._sums:
            self._sums[id(variable)] = beside(variable, "sum_of_gradients")
        return self._sums[id(variable)]

    def clear(self) -> None:
        for total in self._sums.values():
            total.assign(tf.zeros_like(total))


class AccumulatedUpdates(UpdatesInRounds):
    """The rule `inner`, once in `steps` steps."""

    def __init__(self, steps: int, inner: Updates) -> None:
        """See `gradring.updates.AllReduce.sync_every`."""
        super().__init__()
        self._steps = steps
        self._inner = inner

    def begin(self, optimizer: Any) -> _Sums:
        """With sums of nothing."""
        return _Sums(optimizer)

    def build(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """As `inner`."""
        self._inner.build(optimizer, variables)

    def apply(
        self, optimizer: Any, apply: Apply, gradients: Sequence[Gradient], variables: Sequence[Any]
    ) -> None:
        """Adds the gradients up, and in the last step of a round applies their mean."""
        round = self.round_of(optimizer)
        pairs = list(zip(gradients, variables, strict=True))
        for gradient, variable in pairs:
            if isinstance(gradient, tf.IndexedSlices):
                round.of(variable).scatter_add(gradient)
            elif gradient is not None:
                round.of(variable).assign_add(gradient)
        round.steps.assign_add(1)

        def update() -> None:
            means = [None if grad is None else round.of(v) / self._steps for grad, v in pairs]
            self._inner.apply(optimizer, apply, means, variables)
            round.clear()
            round.steps.assign(0)

        when(round.steps >= self._steps, update)

    def sync(self, variables: Iterable[Any]) -> None:
        """As `inner`: sums that are not complete touch no variable."""
        self._inner.sync(variables)

    def forget(self, variables: Iterable[Any]) -> None:
        """Clears the sums."""
        variables = list(variables)
        for round in self.about(variables):
            round.clear()
        super().forget(variables)
        self._inner.forget(variables)

    def unsynchronised(self) -> Iterator[Any]:
        """As `inner`."""
        return self._inner.unsynchronised()
