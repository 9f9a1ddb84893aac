"""`gradring.updates.Primary`: only the chief's optimizer runs, and it broadcasts the variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from gradring.gradients.names import Names
from gradring.group.communicator import Communicator
from gradring.tensorflow.graph.broadcast_update import CHIEF, broadcast_tensors
from gradring.tensorflow.graph.cross_device_ops import alone
from gradring.tensorflow.rules.updates import (
    Apply,
    Gradient,
    Round,
    UpdatesInRounds,
    gradients_by,
    own,
)


class PrimaryUpdates(UpdatesInRounds):
    """Sums gradients on all ranks, and broadcasts the variables that the chief's optimizer updated.

    The optimizer state of the other ranks, such as Adam's moments, stays unchanged. A round lasts
    until `sync`, which sends them the chief's state.
    """

    def __init__(self, communicator: Communicator) -> None:
        """Takes the group of the strategy."""
        super().__init__()
        self._communicator = communicator

    def apply(
        self, optimizer: Any, apply: Apply, gradients: Sequence[Gradient], variables: Sequence[Any]
    ) -> None:
        """Applies the sums on the chief only, and assigns the chief's variables on all ranks."""
        round = self.round_of(optimizer)
        present = [gradient for gradient in gradients if gradient is not None]
        with gradients_by(optimizer, gradients, variables):
            sums = iter(_summed(present))
        if self._communicator.rank == CHIEF:
            with alone():
                apply([None if gradient is None else next(sums) for gradient in gradients])
        # Every rank needs the optimizer's scalars: the number of steps, and the loss scale.
        scalars = [part for part in round.state if not len(part.shape)]
        self._receive("Primary: variables", [*round.trained, *scalars])
        round.steps.assign_add(1)

    def end(self, round: Round) -> None:
        """Broadcasts the state of the chief's optimizer."""
        self._receive("Primary: optimizer", round.state)

    def _receive(self, label: str, variables: Sequence[Any]) -> None:
        parts = [own(variable) for variable in variables]
        values = [tf.convert_to_tensor(part) for part in parts]
        names = Names.of_variables(label, values, variables)
        received = broadcast_tensors(values, names, self._communicator)
        for part, value in zip(parts, received, strict=True):
            part.assign(value)


def _summed(gradients: Sequence[Any]) -> Sequence[Any]:
    context = tf.distribute.get_replica_context()
    return context.all_reduce(tf.distribute.ReduceOp.SUM, list(gradients))  # type: ignore[no-any-return]
