"""``sync_every``: gradients of several steps are summed before another rule gets their mean.

Keras' `gradient_accumulation_steps` also sums gradients and reduces them in every k-th step only.
But it counts every step. So schedules of the learning rate run k times as fast as with batches of k
times the size, and moving averages of weights are updated in every step. Here, the optimizer runs
only in every k-th step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from gradring.tensorflow.graph import compat
from gradring.tensorflow.graph.replica_step import id_of
from gradring.tensorflow.rules.updates import (
    Apply,
    Gradient,
    RoundOfParts,
    Updates,
    UpdatesInRounds,
    beside,
    when,
)


class _Sum:
    """Sums of a round's gradients, for variables that one call of `apply` updates."""

    def __init__(self) -> None:
        self._sums: dict[int, tf.Variable] = {}
        self.steps = compat.plain_variable(0, "steps", tf.int64)

    def add(self, variable: Any, gradient: Gradient) -> None:
        if gradient is None:
            return
        if id_of(variable) not in self._sums:
            self._sums[id_of(variable)] = beside(variable, "sum_of_gradients")
        total = self._sums[id_of(variable)]
        if isinstance(gradient, tf.IndexedSlices):
            total.scatter_add(gradient)
        else:
            total.assign_add(gradient)

    def mean(self, variable: Any, steps: int) -> Gradient:
        """Returns the sum divided by `steps`; None if no step had a gradient."""
        total = self._sums.get(id_of(variable))
        return None if total is None else total / steps

    def clear(self) -> None:
        self.forget_gradients()
        self.steps.assign(0)

    def forget_gradients(self) -> None:
        """Clears the sums; the number of steps stays equal on all ranks."""
        for total in self._sums.values():
            total.assign(tf.zeros_like(total))


class AccumulatedUpdates(UpdatesInRounds):
    """Applies the rule `inner` once in `steps` steps, to the mean of their gradients."""

    def __init__(self, steps: int, inner: Updates) -> None:
        """See `gradring.updates.AllReduce.sync_every`."""
        super().__init__()
        self._steps = steps
        self._inner = inner
        self.applies_inside = inner.applies_inside
        self.holds_parts = inner.holds_parts

    def begin(self, optimizer: Any) -> RoundOfParts[_Sum]:
        """Begins a round without sums."""
        return RoundOfParts(optimizer, lambda _: _Sum())

    def build(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Prepares the optimizer for `inner`."""
        self._inner.build(optimizer, variables)

    def add_variable(self, make: Callable[[], Any], optimizer: Any, reference: Any) -> Any:
        """Makes a variable of the optimizer's state as `inner` does."""
        return self._inner.add_variable(make, optimizer, reference)

    def clip(
        self, clip: Callable[[Sequence[Gradient]], Any], optimizer: Any, gradients: Sequence[Any]
    ) -> Any:
        """Clips as `inner` does."""
        return self._inner.clip(clip, optimizer, gradients)

    def norm(self, own_norm: tf.Tensor) -> tf.Tensor:
        """Returns the norm as `inner` does."""
        return self._inner.norm(own_norm)

    def before_saving(self, variables: Iterable[Any]) -> None:
        """Prepares a file as `inner` does."""
        self._inner.before_saving(variables)

    def apply(
        self, optimizer: Any, apply: Apply, gradients: Sequence[Gradient], variables: Sequence[Any]
    ) -> None:
        """Adds gradients to the sums; in the last step of a round, applies their mean."""
        total = self.round_of(optimizer).of(variables)
        for gradient, variable in zip(gradients, variables, strict=True):
            total.add(variable, gradient)
        total.steps.assign_add(1)

        def update() -> None:
            means = [total.mean(variable, self._steps) for variable in variables]
            self._inner.apply(optimizer, apply, means, variables)
            total.clear()

        when(total.steps >= self._steps, update)

    def sync(self, variables: Iterable[Any]) -> None:
        """Makes the replicas equal by `inner`; incomplete sums have changed no variable."""
        self._inner.sync(variables)

    def forget(self, variables: Iterable[Any]) -> None:
        """Clears the sums, which belong to earlier values of the variables."""
        variables = list(variables)
        for round in self.about(variables):
            round.clear()
        self._inner.forget(variables)

    def note_loaded(self, variables: Iterable[Any]) -> None:
        """Clears the sums; the other ranks may not have read the file."""
        variables = list(variables)
        for round in self.about(variables):
            round.forget_gradients()
        self._inner.note_loaded(variables)

    def unsynchronised(self) -> Iterator[Any]:
        """Returns the variables that `inner` leaves different on each replica."""
        return self._inner.unsynchronised()
