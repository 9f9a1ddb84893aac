"""`gradring.updates.LocalSGD`: each rank trains alone for a round, then all average.

Under a strategy, a loss is divided by the number of replicas, because their gradients are summed.
Local steps do not sum gradients. So each replica multiplies its gradient by the number of replicas,
which gives the gradient of the mean over its own batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import tensorflow as tf

from gradring import updates
from gradring.errors import ConfigError
from gradring.gradients.names import Names
from gradring.gradients.reduction import Reduction
from gradring.group.communicator import Communicator
from gradring.tensorflow.graph.cross_device_ops import alone
from gradring.tensorflow.graph.reduction import reduce_leaves
from gradring.tensorflow.rules.updates import (
    Apply,
    Gradient,
    Round,
    UpdatesInRounds,
    beside,
    own,
    times,
    when,
)


class _LocalRound(Round):
    """A round that also keeps the values that the outer step needs."""

    def __init__(self, optimizer: Any, momenta: Sequence[Any]) -> None:
        super().__init__(optimizer)
        #: Moving statistics by `id` of their variables; batches update these, not gradients.
        self.statistics: dict[int, Any] = {}
        #: Momenta of the outer optimizer; they are variables of the inner one, so they are saved.
        self.momenta = momenta
        #: Values of the trained variables when the round began; empty without momenta.
        self.before = [beside(variable, "before_round") for variable in self.trained if momenta]


class LocalUpdates(UpdatesInRounds):
    """Averages the weights in every `rule.every`-th step."""

    are_local = True

    def __init__(
        self, rule: updates.LocalSGD, communicator: Communicator, bucket_bytes: int
    ) -> None:
        """Takes the rule, and group and bucket size of the strategy."""
        super().__init__()
        self._rule = rule
        self._communicator = communicator
        self._bucket_bytes = bucket_bytes
        self._momenta: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()
        #: Moving statistics that the current step has changed.
        self._statistics: list[Any] = []

    def build(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Adds variables for the outer momenta to the optimizer, if the rule has an outer one.

        Raises:
            gradring.errors.ConfigError: The optimizer has `use_ema`, whose averages would differ
                between ranks.
        """
        if optimizer.use_ema:
            raise ConfigError(
                f"use_ema=True of {optimizer.name} would average the weights of each rank for "
                f"itself under update={self._rule}; leave one of them out"
            )
        if self._rule.outer is not None:
            self._momenta[optimizer] = [
                optimizer.add_variable_from_reference(variable, name="outer_momentum")
                for variable in variables
            ]

    def begin(self, optimizer: Any) -> _LocalRound:
        """Begins a round with the momenta that `build` has made."""
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        return _LocalRound(optimizer, self._momenta.get(inner, []))

    def apply(
        self, optimizer: Any, apply: Apply, gradients: Sequence[Gradient], variables: Sequence[Any]
    ) -> None:
        """Applies this replica's gradients; averages the weights in the last step of a round."""
        round = self.round_of(optimizer)
        round.statistics |= {id(variable): variable for variable in self._statistics}
        self._statistics.clear()
        if round.momenta:
            when(tf.equal(round.steps, 0), lambda: _copy(round.trained, round.before))
        with alone():
            apply([times(gradient, self._communicator.world_size) for gradient in gradients])
        round.steps.assign_add(1)
        self.end_if(round.steps >= self._rule.every, round)

    def add_statistics(self, variables: Sequence[Any]) -> None:
        """Notes moving statistics, which are averaged with the next applied optimizer's weights."""
        self._statistics.extend(variables)

    def end(self, round: _LocalRound) -> None:
        """Averages weights and statistics over the ranks, and performs the outer step."""
        variables = [*round.trained, *round.statistics.values()]
        values = [tf.convert_to_tensor(own(variable)) for variable in variables]
        names = Names.of_variables("LocalSGD: mean", values, variables)
        means = reduce_leaves(
            values, Reduction(self._communicator, names, "mean", self._bucket_bytes)
        )
        if round.momenta:
            outer = self._rule.outer
            assert outer is not None, "only an outer optimizer has momenta"
            for index, (before, momentum) in enumerate(
                zip(round.before, map(own, round.momenta), strict=True)
            ):
                moved = before - means[index]
                momentum.assign(outer.momentum * momentum + moved)
                means[index] = before - outer.learning_rate * (moved + outer.momentum * momentum)
        for variable, value in zip(variables, means, strict=True):
            own(variable).assign(value)

    def unsynchronised(self) -> Iterator[Any]:
        """Yields the state of the inner optimizers, which follows each rank's own gradients."""
        for round in self.rounds.values():
            momenta = {id(momentum) for momentum in round.momenta}
            yield from (part for part in round.state if id(part) not in momenta)


def _copy(sources: Sequence[Any], targets: Sequence[tf.Variable]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.assign(own(source))
