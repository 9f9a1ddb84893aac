"""Comparison of the ranks' models while they train: variables, and batches that all ranks have.

`fit` compares at the ends of epochs. `train_on_batch` has none, so it compares after the batches 1,
2, 4, 8, and so on.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from gradring.gradients.replicas import hash_of
from gradring.group.require_equal import gather_if_different
from gradring.tensorflow.data.python_batches import is_due
from gradring.tensorflow.graph import apart
from gradring.tensorflow.graph.adoption import is_given
from gradring.tensorflow.graph.fallback import falls_back
from gradring.tensorflow.graph.model_variables import raw_variables_of, variables_of
from gradring.tensorflow.replicas import contents, unlike
from gradring.tensorflow.rules.updates import updates_of

#: Number of variables that a warning names.
_NAMES_SHOWN = 8
#: The kinds of differences that `unlike` finds, in its order, each with cause and remedy.
_UNLIKE = {
    "variables": "Each rank assigns them from its part of the batch and keeps its values; files "
    "get those of rank 0. Make them with aggregation=tf.VariableAggregation.MEAN (in Keras 3 "
    "aggregation='mean'), or copy those of rank 0 to all ranks after fit: "
    "gradring.tensorflow.broadcast_variables(model.variables)",
    "weights": "Each rank has set its own, as by load_weights, set_weights or adapt with other "
    "files or data; files get those of rank 0. Give all ranks the same files, and adapt to the "
    "same data in the same order (shuffle with a seed). Or call before fit: "
    "gradring.tensorflow.broadcast_variables(model.variables)",
}
#: The same kinds for a program that knows of no replicas: its variables have no aggregation.
_UNLIKE_IF_GIVEN = {
    "variables": "Each rank assigns them from its part of the batch and keeps its values; files "
    "get those of rank 0. Assign the mean over the ranks: "
    'gradring.tensorflow.all_reduce(value, op="mean")',
    "weights": "Each rank has set its own, as by load_weights or set_weights, or its step scales "
    "or skips updates by a loss of its own samples; files get those of rank 0. Give all ranks the "
    "same files, and decide by the mean loss: "
    'gradring.tensorflow.all_reduce(loss, op="mean")',
}
#: Remedy for batches that differ, in a program that knows of no replicas.
_OTHER_BATCHES = (
    "Each rank takes its part of its own batch, so the parts are those of different batches. Give "
    "all ranks the same batches: numpy and Python's random draw the same on each, and tf.random "
    "does with a seed"
)


def tell(model: Any, when: str, of_weights: bool) -> bool:
    """Warns on rank 0 of variables of a model that differ between ranks; all ranks must call it.

    Args:
        model: A Keras model.
        when: The part of the training that has ended, such as "epoch 0 of fit".
        of_weights: True if all weights are compared, and not only those that steps assign.

    Returns:
        True if variables differ.

    Raises:
        gradring.errors.ConfigError: Variables differ in the group of a strict strategy.
    """
    strategy = model.distribute_strategy
    weights = model.weights if of_weights and updates_of(strategy).ends_equal else ()
    raw = list(raw_variables_of(model))
    # A given program's variables belong to no strategy, so their assignments are not recorded.
    of_given = is_given(strategy)
    known = model.non_trainable_variables if of_given else ()
    found = unlike([*variables_of(model), *raw], strategy.communicator, weights, [*known, *raw])
    causes = _UNLIKE_IF_GIVEN if of_given else _UNLIKE
    for (kind, cause), names in zip(causes.items(), found, strict=True):
        if names:
            shown = ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
            apart.tell(
                strategy.communicator,
                f"after {when}, {kind} of the model {model.name!r} differ between the ranks "
                f"({len(names)}): {shown}. {cause}",
            )
    return any(found)


def compare_batches(strategy: Any) -> None:
    """Compares the batches that Python code has made for a loop; all ranks must call it.

    Raises:
        gradring.errors.ConfigError: Batches differ in the group of a strict strategy.
    """
    if not updates_of(strategy).are_local:  # else the ranks may have run other numbers of steps
        strategy.extended.python_batches.compare(strategy.communicator)


class OwnBatches:
    """Batches of `train_on_batch`, of which all ranks train as many."""

    def __init__(self, model: Any) -> None:
        """Begins before the first batch of a model."""
        self._model = model
        self._seen = 0
        self._compares = True
        self._compares_batches = is_given(model.distribute_strategy)

    def before(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Returns the batches of a step; compares the first one, if every rank has the same."""
        self._seen += 1
        if not (self._is_due() and self._compares_batches):
            return batches
        batch = next(batches)
        self._compare_batch(batch)
        return itertools.chain([batch], batches)

    def after(self) -> None:
        """Compares the ranks' variables when a step is over."""
        if self._is_due() and self._compares:
            when = f"batch {self._seen} of train_on_batch"
            self._compares = not tell(self._model, when, of_weights=True)

    def _is_due(self) -> bool:
        """Returns whether the ranks compare at this batch.

        Workers of local steps may train other numbers of batches. So may ranks that have joined an
        elastic job.
        """
        strategy = self._model.distribute_strategy
        communicator = strategy.communicator
        if communicator.world_size == 1 or communicator.generation > 0:
            return False
        return not updates_of(strategy).are_local and is_due(self._seen)

    def _compare_batch(self, batch: Any) -> None:
        communicator = self._model.distribute_strategy.communicator
        own = b""
        with falls_back("the comparison of the ranks' batches", "each rank takes its own"):
            leaves = tf.nest.flatten(batch, expand_composites=True)
            hashes = [hash_of(contents(leaf)) for leaf in leaves if leaf is not None]
            own = np.array(hashes, np.int64).tobytes()
        found = gather_if_different(communicator, own, "batches of train_on_batch")
        if found is None or b"" in found:
            return
        self._compares_batches = False
        apart.tell(
            communicator,
            f"batch {self._seen} of train_on_batch of the model {self._model.name!r} differs "
            f"between the ranks. {_OTHER_BATCHES}",
        )
