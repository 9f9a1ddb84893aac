"""The hooks of an update rule, and what rules have in common that last for several steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import tensorflow as tf

from gradring.tensorflow.graph import compat, replica_step
from gradring.tensorflow.graph.cross_device_ops import gradients_of
from gradring.tensorflow.graph.dtypes import map_values
from gradring.tensorflow.graph.model_variables import local_parts, optimizer_variables
from gradring.tensorflow.graph.reduction import with_known_shapes
from gradring.tensorflow.graph.replica_step import id_of
from gradring.tensorflow.seams import keras_names

#: Of a variable, or None where the loss does not depend on it.
Gradient: TypeAlias = "tf.Tensor | tf.IndexedSlices | None"
#: The optimizer's own `apply`, for these gradients.
Apply: TypeAlias = Callable[[Sequence[Gradient]], None]


class Updates:
    """What a rule does with the gradients of a step; this one leaves all to the optimizer.

    The optimizer sums the gradients over all ranks, which is `gradring.updates.AllReduce`.
    """

    #: Whether a step is the replica's own business, so that nothing else in it should communicate.
    are_local = False
    #: Whether `step` takes the place of the optimizer's own step, which must not run then.
    replaces_step = False
    #: Whether the ranks have the same weights after `sync` of the same step.
    ends_equal = True

    def build(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """An optimizer is being built for these variables, in the scope of the strategy."""

    def apply(
        self, optimizer: Any, apply: Apply, gradients: Sequence[Gradient], variables: Sequence[Any]
    ) -> None:
        """Takes the place of `optimizer.apply`, in a replica; the optimizer is built.

        Args:
            optimizer: Of Keras 3; a `LossScaleOptimizer` has the other one inside.
            apply: Its own `apply`, which reduces, unless it is called inside of `alone`.
            gradients: The replica's part of the sum over all replicas.
            variables: What these are the gradients of.
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
        """Takes the place of what an optimizer does with gradients that it has clipped.

        Args:
            step: The optimizer's own step; takes the last three arguments, and reduces.
            optimizer: The one inside of a `LossScaleOptimizer`.
            gradients: Of variables that have one.
            variables: Those.
            learning_rate: Of this step.
        """
        step(gradients, variables, learning_rate)

    def stats(self) -> dict[str, Any]:
        """What the rule has counted."""
        return {}

    def leave(self) -> None:
        """This process trains no more."""

    def add_statistics(self, variables: Sequence[Any]) -> None:
        """If `are_local`: the step that is being done has changed these by the replica's batch."""

    def sync(self, variables: Iterable[Any]) -> None:
        """Makes the replicas equal where the rule lets them differ: those of these variables."""

    def forget(self, variables: Iterable[Any]) -> None:
        """All ranks have given these variables the same values; what was begun is void."""

    def unsynchronised(self) -> Iterator[Any]:
        """What every replica has for itself, even after `sync`."""
        return iter(())


#: What a strategy of others does.
NO_RULE = Updates()


def updates_of(strategy: tf.distribute.Strategy | None) -> Updates:
    """Those of a strategy of ours; of another one, those that do nothing."""
    found = getattr(getattr(strategy, "extended", None), "updates", None)
    return found if isinstance(found, Updates) else NO_RULE


def apply(
    updates: Updates, original: Callable[..., None], optimizer: Any, gradients: Any, variables: Any
) -> None:
    """Does `optimizer.apply` by a rule; but once, where an optimizer has another one inside."""
    knows_variables = variables is not None or optimizer.built
    if (
        type(updates) is Updates
        or replica_step.current().is_applying
        or not gradients
        or not knows_variables
    ):
        original(optimizer, gradients, variables)
        return
    if not optimizer.built:
        optimizer.build(list(variables))
    variables = trained_by(optimizer) if variables is None else list(variables)
    with replica_step.holding(is_applying=True):
        updates.apply(
            optimizer,
            lambda changed: original(optimizer, changed, variables),
            with_known_shapes(list(gradients), variables),
            variables,
        )
    # Whatever the rule has done: an optimizer may assign them afterwards, to decay or clip them.
    replica_step.current().reductions.note_gradients(variables)


class Round:
    """The steps of one optimizer, from one in which something is begun to that which ends it."""

    def __init__(self, optimizer: Any) -> None:
        """Nothing is begun; the optimizer is built."""
        self.trained = trained_by(optimizer)
        #: The optimizer's own variables.
        self.state = list(optimizer_variables(optimizer))
        #: How many are done. It belongs to this process, and is not saved.
        self.steps = compat.plain_variable(0, "steps", tf.int64)

    def has_any(self, ids: Collection[int]) -> bool:
        """Whether it is about one of the variables."""
        return any(id_of(variable) in ids for variable in (*self.trained, *self.state))


class UpdatesInRounds(Updates):
    """A rule whose optimizers have rounds; `begin` and `end` say what these do."""

    def __init__(self) -> None:
        """No optimizer has done a step."""
        self.rounds: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def begin(self, optimizer: Any) -> Round:
        """The `Round` of an optimizer that is built."""
        return Round(optimizer)

    def end(self, round: Any) -> None:
        """A round that has begun ends."""
        raise NotImplementedError

    def round_of(self, optimizer: Any) -> Any:
        """That of an optimizer, from its first step on."""
        if optimizer not in self.rounds:
            self.rounds[optimizer] = self.begin(optimizer)
        return self.rounds[optimizer]

    def end_if(self, condition: tf.Tensor, round: Any) -> None:
        """Ends a round under a condition; eagerly, and in graphs."""

        def ending() -> None:
            self.end(round)
            round.steps.assign(0)

        when(condition, ending)

    def sync(self, variables: Iterable[Any]) -> None:
        """Ends what has begun."""
        for round in self.about(variables):
            self.end_if(round.steps > 0, round)

    def forget(self, variables: Iterable[Any]) -> None:
        """Begins anew."""
        for round in self.about(variables):
            round.steps.assign(0)

    def about(self, variables: Iterable[Any]) -> list[Any]:
        """The rounds of optimizers that have, or train, one of these variables."""
        ids = {id_of(variable) for variable in variables}
        return [round for round in self.rounds.values() if round.has_any(ids)]


def trained_by(optimizer: Any) -> list[Any]:
    """The variables for which an optimizer of Keras 3 was built."""
    return list(keras_names.TRAINED.of(optimizer))


def gradients_by(
    optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]
) -> AbstractContextManager[None]:
    """Inside, reductions of those that are not None are called after their variables."""
    pairs = zip(gradients, variables, strict=True)
    present = [variable for gradient, variable in pairs if gradient is not None]
    return gradients_of(present, among=trained_by(optimizer))


def when(condition: tf.Tensor, act: Callable[[], None]) -> None:
    """`tf.cond` without a result."""

    def acting() -> tf.Tensor:
        act()
        return tf.constant(0)

    tf.cond(condition, acting, lambda: tf.constant(0))


def own(variable: Any) -> tf.Variable:
    """The variable of this process, of one device, behind one of the strategy.

    Assigning to the strategy's own, in a replica, would average over all replicas.
    """
    (part,) = local_parts(variable)
    return part


def beside(variable: Any, name: str) -> tf.Variable:
    """Zeros of the variable's shape and dtype, where it is, for this process alone."""
    part = own(variable)
    return compat.plain_variable(0, name, part.dtype, part.shape, part.device)


def times(gradient: Gradient, factor: int) -> Gradient:
    """The gradient, multiplied."""
    if factor == 1:
        return gradient
    return map_values(lambda values: values * tf.cast(factor, values.dtype), gradient)
