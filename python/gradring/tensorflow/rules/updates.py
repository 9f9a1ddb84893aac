"""Hooks of an update rule, and the common part of rules whose rounds last several steps."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, Protocol, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import tensorflow as tf

from gradring.tensorflow.graph import compat, replica_step
from gradring.tensorflow.graph.cross_device_ops import gradients_of
from gradring.tensorflow.graph.dtypes import map_values
from gradring.tensorflow.graph.model_variables import local_parts, optimizer_variables
from gradring.tensorflow.graph.reduction import with_known_shapes
from gradring.tensorflow.graph.replica_step import id_of
from gradring.tensorflow.seams import keras_names

#: Gradient of a variable; None if the loss does not depend on the variable.
Gradient: TypeAlias = "tf.Tensor | tf.IndexedSlices | None"
#: The optimizer's own `apply`, as a function of gradients, and of variables if others than those of
#: the call are to be updated.
Apply: TypeAlias = Callable[..., None]


class Updates:
    """An update rule; this base class is `gradring.updates.AllReduce`.

    It leaves the gradients to the optimizer, which sums them over all ranks.
    """

    #: True if replicas step independently; nothing else in the step should communicate then.
    are_local = False
    #: True if `step` replaces the optimizer's own step, which must not run then.
    replaces_step = False
    #: True if all ranks have the same weights after `sync` of the same step.
    ends_equal = True
    #: True if each rank holds a part of the optimizer's state.
    holds_parts = False
    #: True if the logs of `fit` cover the samples of one rank.
    logs_own_samples = False
    #: True if a `LossScaleOptimizer` runs plainly, and the rule applies to the optimizer inside.
    applies_inside = False

    def build(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Prepares an optimizer that is built for these variables in the strategy's scope."""

    def add_variable(self, make: Callable[[], Any], optimizer: Any, reference: Any) -> Any:
        """Returns a variable of the optimizer's state that `make` makes.

        Args:
            make: Makes a variable of the shape of `reference`.
            optimizer: The optimizer that is being built.
            reference: The variable that it trains.
        """
        return make()

    def apply(
        self, optimizer: Any, apply: Apply, gradients: Sequence[Gradient], variables: Sequence[Any]
    ) -> None:
        """Replaces `optimizer.apply` in a replica; the optimizer has been built.

        Args:
            optimizer: An optimizer of Keras 3; may be a `LossScaleOptimizer` around another one.
            apply: The optimizer's own `apply`, which reduces, except inside of `alone`.
            gradients: The replica's part of the sum over all replicas.
            variables: Variables of the gradients.
        """
        apply(gradients)

    def step(
        self,
        step: Callable[..., None],
        optimizer: Any,
        gradients: Sequence[Gradient],
        variables: Sequence[Any],
        learning_rate: Any,
    ) -> None:
        """Replaces the optimizer's step, after clipping.

        Args:
            step: The optimizer's own step; takes the last three arguments, and reduces.
            optimizer: The optimizer; if there is a `LossScaleOptimizer`, its inner one.
            gradients: Gradients that are not None.
            variables: Variables of the gradients.
            learning_rate: Learning rate of this step.
        """
        step(gradients, variables, learning_rate)

    def clip(
        self, clip: Callable[[Sequence[Gradient]], Any], optimizer: Any, gradients: Sequence[Any]
    ) -> Any:
        """Clips sums of gradients.

        Args:
            clip: The optimizer's own clipping.
            optimizer: The optimizer.
            gradients: The sums that this rank applies.
        """
        return clip(gradients)

    def norm(self, own_norm: tf.Tensor) -> tf.Tensor:
        """Returns the norm of all sums of gradients from that of the sums that this rank has."""
        return own_norm

    def stats(self) -> dict[str, Any]:
        """Returns the rule's counters."""
        return {}

    def leave(self) -> None:
        """Ends the rule's connections, because this process trains no more."""

    def add_statistics(self, variables: Sequence[Any]) -> None:
        """Notes moving statistics that the current step has updated; called if `are_local`."""

    def sync(self, variables: Iterable[Any]) -> None:
        """Makes the replicas of these variables equal, if the rule lets them differ."""

    def before_saving(self, variables: Iterable[Any]) -> None:
        """Prepares a file that one rank writes; called on all ranks whose callbacks save."""

    def forget(self, variables: Iterable[Any]) -> None:
        """Drops unfinished rounds, because all ranks have given these variables equal values."""

    def note_assigned(self, variable: Any) -> None:
        """Notes that the program assigns a variable of the strategy between two steps."""

    def note_loaded(self, variables: Iterable[Any]) -> None:
        """Notes that the program has read variables from a file, on this rank at least."""

    def unsynchronised(self) -> Iterator[Any]:
        """Yields the variables that differ between replicas even after `sync`."""
        return iter(())


#: Rule of strategies that are not ours.
NO_RULE = Updates()

#: Rules of optimizers that communicate by themselves, outside of strategies. All ranks make these
#: optimizers in the same order.
_of_optimizers: WeakKeyDictionary[Any, Updates] = WeakKeyDictionary()


class _UpdatesOfOptimizers(Updates):
    """The rules of all optimizers outside of strategies; each rule knows its variables."""

    def __init__(self, rules: Sequence[Updates]) -> None:
        """Takes the rules, in the same order on every rank."""
        self._rules = rules
        self.holds_parts = any(rule.holds_parts for rule in rules)

    def sync(self, variables: Iterable[Any]) -> None:
        """Calls `sync` of each rule."""
        variables = list(variables)
        for rule in self._rules:
            rule.sync(variables)

    def before_saving(self, variables: Iterable[Any]) -> None:
        """Calls `before_saving` of each rule."""
        variables = list(variables)
        for rule in self._rules:
            rule.before_saving(variables)


def updates_of(strategy: tf.distribute.Strategy | None, optimizer: Any = None) -> Updates:
    """Returns the rule of an optimizer outside of strategies, or that of a strategy of ours.

    Returns:
        `NO_RULE` for other optimizers and other strategies.
    """
    if optimizer is not None and optimizer in _of_optimizers:
        return _of_optimizers[optimizer]
    found = getattr(getattr(strategy, "extended", None), "updates", None)
    return found if isinstance(found, Updates) else NO_RULE


def set_updates(optimizer: Any, updates: Updates) -> None:
    """Gives an optimizer outside of strategies its rule, before it is built."""
    _of_optimizers[optimizer] = updates


def updates_of_optimizers() -> Updates:
    """Returns the rules of all optimizers outside of strategies; `NO_RULE` if there are none."""
    # Copies of an optimizer have one rule.
    rules = list(dict.fromkeys(_of_optimizers.values()))
    return _UpdatesOfOptimizers(rules) if rules else NO_RULE


def apply(
    updates: Updates, original: Callable[..., None], optimizer: Any, gradients: Any, variables: Any
) -> None:
    """Calls `optimizer.apply` by a rule; an optimizer inside another one is called plainly."""
    knows_variables = variables is not None or optimizer.built
    if (
        type(updates) is Updates
        or replica_step.current().is_applying
        or not gradients
        or not knows_variables
        or (updates.applies_inside and hasattr(optimizer, "inner_optimizer"))
    ):
        original(optimizer, gradients, variables)
        return
    if not optimizer.built:
        optimizer.build(list(variables))
    variables = trained_by(optimizer) if variables is None else list(variables)
    with replica_step.holding(is_applying=True):
        updates.apply(
            optimizer,
            lambda changed, others=variables: original(optimizer, changed, others),
            with_known_shapes(list(gradients), variables),
            variables,
        )
    # Noted for every rule: an optimizer may still assign the variables, to decay or clip them.
    replica_step.current().reductions.note_gradients(variables)


class Round:
    """State of one optimizer between two synchronisations, such as the averages of `LocalSGD`."""

    def __init__(self, optimizer: Any) -> None:
        """Begins with no step; the optimizer must have been built."""
        self.trained = trained_by(optimizer)
        #: The optimizer's own variables.
        self.state = list(optimizer_variables(optimizer))
        #: Number of steps done in this round, in this process; it is not saved.
        self.steps = compat.plain_variable(0, "steps", tf.int64)

    def has_any(self, ids: Collection[int]) -> bool:
        """Returns whether the optimizer has or trains a variable with one of the ids."""
        return any(id_of(variable) in ids for variable in (*self.trained, *self.state))


class _Part(Protocol):
    def clear(self) -> None:
        """Forgets all values."""

    def forget_gradients(self) -> None:
        """Forgets gradients that were kept, but not how many steps kept them."""


P = TypeVar("P", bound=_Part)


class RoundOfParts(Round, Generic[P]):
    """A round with a part for each list of variables to which a program applies an optimizer."""

    def __init__(self, optimizer: Any, make: Callable[[Sequence[Any]], P]) -> None:
        """Begins without parts; ``make`` returns a new part for a list of variables."""
        super().__init__(optimizer)
        self._make = make
        self._parts: dict[tuple[int, ...], P] = {}

    def of(self, variables: Sequence[Any]) -> P:
        """Returns the part of these variables."""
        key = tuple(id_of(variable) for variable in variables)
        if key not in self._parts:
            self._parts[key] = self._make(variables)
        return self._parts[key]

    def clear(self) -> None:
        """Clears all parts."""
        for part in self._parts.values():
            part.clear()

    def forget_gradients(self) -> None:
        """Has all parts forget gradients."""
        for part in self._parts.values():
            part.forget_gradients()


class UpdatesInRounds(Updates):
    """A rule whose optimizers have rounds; subclasses define `begin` and `end`."""

    def __init__(self) -> None:
        """Begins without rounds."""
        self.rounds: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def begin(self, optimizer: Any) -> Round:
        """Returns a new `Round` for an optimizer that has been built."""
        return Round(optimizer)

    def end(self, round: Any) -> None:
        """Synchronises the replicas at the end of a round that has steps."""
        raise NotImplementedError

    def round_of(self, optimizer: Any) -> Any:
        """Returns the round of an optimizer; begins one at its first step."""
        if optimizer not in self.rounds:
            self.rounds[optimizer] = self.begin(optimizer)
        return self.rounds[optimizer]

    def end_if(self, condition: tf.Tensor, round: Any) -> None:
        """Ends a round if `condition` is true, eagerly or in a graph."""

        def ending() -> None:
            self.end(round)
            round.steps.assign(0)

        when(condition, ending)

    def sync(self, variables: Iterable[Any]) -> None:
        """Ends the rounds of these variables that have steps."""
        for round in self.about(variables):
            self.end_if(round.steps > 0, round)

    def forget(self, variables: Iterable[Any]) -> None:
        """Restarts the rounds of these variables without synchronisation."""
        for round in self.about(variables):
            round.steps.assign(0)

    def about(self, variables: Iterable[Any]) -> list[Any]:
        """Returns the rounds of optimizers that have or train one of these variables."""
        ids = {id_of(variable) for variable in variables}
        return [round for round in self.rounds.values() if round.has_any(ids)]


def is_wrapper(optimizer: Any) -> bool:
    """Returns whether an optimizer of Keras leaves all updates to the optimizers inside of it."""
    names = ("LossScaleOptimizer", "MultiOptimizer")
    kinds = [getattr(sys.modules["keras"].optimizers, name, None) for name in names]
    return isinstance(optimizer, tuple(kind for kind in kinds if kind is not None))


def trained_by(optimizer: Any) -> list[Any]:
    """Returns the variables for which an optimizer of Keras 3 was built."""
    return list(keras_names.TRAINED.of(optimizer))


def gradients_by(
    optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]
) -> AbstractContextManager[None]:
    """Names reductions of gradients, inside the block, after their variables."""
    pairs = zip(gradients, variables, strict=True)
    present = [variable for gradient, variable in pairs if gradient is not None]
    return gradients_of(present, among=trained_by(optimizer))


def when(condition: tf.Tensor, act: Callable[[], None]) -> None:
    """Calls `act` if `condition` is true, by a `tf.cond` without a result."""

    def acting() -> tf.Tensor:
        act()
        return tf.constant(0)

    tf.cond(condition, acting, lambda: tf.constant(0))


def own(variable: Any) -> tf.Variable:
    """Returns this process's variable behind a strategy's variable; only for one local device.

    Assigning to the strategy's variable in a replica would average over all replicas.
    """
    (part,) = local_parts(variable)
    return part


def beside(variable: Any, name: str) -> tf.Variable:
    """Returns a variable of this process alone: zeros of equal shape, dtype and device."""
    part = own(variable)
    return compat.plain_variable(0, name, part.dtype, part.shape, part.device)


def times(gradient: Gradient, factor: int) -> Gradient:
    """Returns the gradient times `factor`."""
    if factor == 1:
        return gradient
    return map_values(lambda values: values * tf.cast(factor, values.dtype), gradient)
