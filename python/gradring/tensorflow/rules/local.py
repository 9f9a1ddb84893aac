"""`gradring.updates.LocalSGD`: each rank trains alone for a round, then all average.

Under a strategy, a loss is divided by the number of replicas, because their gradients are summed.
Local steps do not sum gradients. So each replica multiplies its gradient by the number of replicas,
which gives the gradient of the mean over its own batch.

An outer optimizer compares the averaged weights with those of the round's beginning, which must be
equal on all ranks. Two things make this comparison wrong. If the program assigns weights within a
round, the round ends with their mean, without an outer step. If another optimizer trains the same
variables, its round begins with the mean of their values. So each trained variable knows its
*holder*, the round in which it is.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import tensorflow as tf

from gradring import updates
from gradring.errors import ConfigError
from gradring.gradients.names import Names
from gradring.gradients.reduction import Reduction
from gradring.group.communicator import Communicator
from gradring.tensorflow.graph import compat
from gradring.tensorflow.graph.cross_device_ops import alone
from gradring.tensorflow.graph.model_variables import local_parts
from gradring.tensorflow.graph.reduction import reduce_leaves
from gradring.tensorflow.graph.replica_step import holding
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

#: Number of the holder of variables that are in no round, and equal on all ranks.
_NONE = 0


class _Holder:
    """The round in which some variables are.

    Attributes:
        number: Number of the round.
        is_assigned: 1 if the program has assigned one of the variables in it, else 0.
    """

    def __init__(self) -> None:
        self.number = compat.plain_variable(_NONE, "holder", tf.int64)
        self.is_assigned = compat.plain_variable(0, "is_assigned")


def _holders_of(variables: Sequence[Any]) -> list[_Holder]:
    """Returns the holders of these variables; those that are first trained together have one."""
    parts = [own(variable) for variable in variables]
    new = _Holder()
    for part in parts:
        if _holder_of(part) is None:
            _be_held(part, new)
    holders = {id(holder): holder for holder in map(_holder_of, parts)}
    return list(holders.values())


def _be_held(self: Any, holder: _Holder) -> None:
    self._gradring_holder = holder


def _holder_of(part: Any) -> Any:
    return getattr(part, "_gradring_holder", None)


class _LocalRound(Round):
    """A round that also keeps the values that the outer step needs."""

    def __init__(self, optimizer: Any, momenta: Sequence[Any], number: int) -> None:
        super().__init__(optimizer)
        #: Moving statistics by `id` of their variables; batches update these, not gradients.
        self.statistics: dict[int, Any] = {}
        #: Momenta of the outer optimizer; they are variables of the inner one, so they are saved.
        self.momenta = momenta
        #: Values of the trained variables when the round began; empty without momenta.
        self.before = [beside(variable, "before_round") for variable in self.trained if momenta]
        self._number = number
        self._holders = _holders_of(self.trained) if momenta else []
        #: For each holder, if the program has assigned one of its variables.
        self.are_assigned = [holder.is_assigned for holder in self._holders]

    def holds_all(self) -> tf.Tensor:
        """Returns whether all trained variables are in this round."""
        return self._all_are(self._number)

    def is_even(self) -> tf.Tensor:
        """Returns whether the trained variables are in no round, and equal on all ranks."""
        return self._all_are(_NONE)

    def take(self) -> None:
        """Begins with the present values of the trained variables."""
        _copy(self.trained, self.before)
        self.steps.assign(0)
        self._give_to(self._number)

    def leave(self) -> None:
        """Leaves the trained variables, which are equal on all ranks."""
        self.steps.assign(0)
        self._give_to(_NONE)
        for flag in self.are_assigned:
            flag.assign(0)

    def _all_are(self, number: int) -> tf.Tensor:
        are = (tf.equal(holder.number, number) for holder in self._holders)
        return functools.reduce(tf.logical_and, are, tf.constant(True))

    def _give_to(self, number: int) -> None:
        for holder in self._holders:
            holder.number.assign(number)


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
        self._numbers = itertools.count(1)

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
        return _LocalRound(optimizer, self._momenta.get(inner, []), next(self._numbers))

    def apply(
        self, optimizer: Any, apply: Apply, gradients: Sequence[Gradient], variables: Sequence[Any]
    ) -> None:
        """Applies this replica's gradients; averages the weights in the last step of a round."""
        round = self.round_of(optimizer)
        round.statistics |= {id(variable): variable for variable in self._statistics}
        self._statistics.clear()
        if round.momenta:
            is_new = tf.logical_not(round.holds_all())
            is_open = tf.logical_or(round.steps > 0, tf.logical_not(round.is_even()))
            when(tf.logical_and(is_new, is_open), lambda: self._average(round, "before a round"))
            when(is_new, round.take)
        with alone():
            apply([times(gradient, self._communicator.world_size) for gradient in gradients])
        round.steps.assign_add(1)
        self.end_if(round.steps >= self._rule.every, round)

    def add_statistics(self, variables: Sequence[Any]) -> None:
        """Notes moving statistics, which are averaged with the next applied optimizer's weights."""
        self._statistics.extend(variables)

    def sync(self, variables: Iterable[Any]) -> None:
        """Ends the rounds of these variables; averages those that cannot be ended as usual."""
        rounds = self.about(variables)
        with holding(is_applying=True):
            for round in rounds:
                self.end_if(tf.logical_and(round.steps > 0, round.holds_all()), round)
            for round in rounds:
                is_open = tf.logical_or(round.steps > 0, tf.logical_not(round.is_even()))
                when(is_open, functools.partial(self._average, round, "of an open round"))

    def forget(self, variables: Iterable[Any]) -> None:
        """Ends the rounds of these variables without synchronisation."""
        for round in self.about(variables):
            round.leave()

    def note_assigned(self, variable: Any) -> None:
        """Has the round of a variable end without an outer step, on all ranks."""
        for part in local_parts(variable):
            if (holder := _holder_of(part)) is not None:
                holder.is_assigned.assign(1)

    def note_loaded(self, variables: Iterable[Any]) -> None:
        """Notes each variable as assigned."""
        for variable in variables:
            self.note_assigned(variable)

    def end(self, round: _LocalRound) -> None:
        """Averages weights and statistics over the ranks, and performs the outer step."""
        variables, means, are_assigned = self._means(round, "")
        if round.momenta:
            outer = self._rule.outer
            assert outer is not None, "only an outer optimizer has momenta"
            is_plain = tf.reduce_any([flag > 0 for flag in are_assigned])
            for index, (before, momentum) in enumerate(
                zip(round.before, map(own, round.momenta), strict=True)
            ):
                moved = before - means[index]
                momentum.assign(tf.where(is_plain, momentum, outer.momentum * momentum + moved))
                stepped = before - outer.learning_rate * (moved + outer.momentum * momentum)
                means[index] = tf.where(is_plain, means[index], stepped)
        for variable, value in zip(variables, means, strict=True):
            own(variable).assign(value)
        round.leave()

    def _average(self, round: _LocalRound, why: str) -> None:
        """Ends a round without an outer step."""
        variables, means, _ = self._means(round, f" {why}")
        for variable, value in zip(variables, means, strict=True):
            own(variable).assign(value)
        round.leave()

    def _means(
        self, round: _LocalRound, why: str
    ) -> tuple[list[Any], list[tf.Tensor], list[tf.Tensor]]:
        """Returns weights and statistics, their means, and those of the flags `are_assigned`."""
        variables = [*round.trained, *round.statistics.values()]
        reduced = [*variables, *round.are_assigned]
        values = [tf.convert_to_tensor(own(variable)) for variable in reduced]
        names = Names.of_variables(f"LocalSGD: mean{why}", values, reduced)
        reduction = Reduction(self._communicator, names, "mean", self._bucket_bytes)
        means = list(reduce_leaves(values, reduction))
        return variables, means[: len(variables)], means[len(variables) :]

    def unsynchronised(self) -> Iterator[Any]:
        """Yields the state of the inner optimizers, which follows each rank's own gradients."""
        for round in self.rounds.values():
            momenta = {id(momentum) for momentum in round.momenta}
            yield from (part for part in round.state if id(part) not in momenta)


def _copy(sources: Sequence[Any], targets: Sequence[tf.Variable]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.assign(own(source))
