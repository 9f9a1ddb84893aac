"""Models of a program that knows of no replicas, which all ranks train as one process would.

`stand_ins.given_strategy` gives these models a strategy. The program keeps plain TensorFlow
variables and sees one replica: Keras divides no loss by the number of replicas, and no scope
surrounds the program's code. The strategy acts only inside of Keras' loops, where it divides the
batches.

Each rank computes its part of a mean over all samples, weighed by its share of the samples:

* Gradients are reduced when a tape returns them. A `train_step` that clips them therefore clips the
  same gradients as one process would. The optimizer reduces gradients that no tape returned.
* A sum over samples is added up instead of averaged. A loss is a sum if Keras says so, or if the
  loss's graph shows it (`graph.extent`).
* A metric counts the samples of its rank. Its variables are added up when the metric is read.

This module has the loops; `given_gradients`, `given_losses` and `given_metrics` have the rest. Each
function that takes an `original` stands in for one of Keras or TensorFlow; `compat_keras.py` says
where.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from gradring.errors import ConfigError
from gradring.gradients.replicas import hash_of
from gradring.group.require_equal import gather_if_different
from gradring.tensorflow.graph import once
from gradring.tensorflow.graph.adoption import communicator_of
from gradring.tensorflow.graph.model_variables import variables_of
from gradring.tensorflow.graph.ops import broadcast_variables
from gradring.tensorflow.graph.replica_step import current
from gradring.tensorflow.keras.empty_batches import rows_of
from gradring.tensorflow.replicas import contents
from gradring.tensorflow.seams import keras_names

_log = logging.getLogger("gradring")

_strategy: Any = None
#: TensorFlow's default replica context, in which code outside of any strategy runs.
_context_outside: Any = None

UNEQUAL_ROWS = "tensors of a part of a batch have different numbers of rows"
#: Remedy for `UNEQUAL_ROWS`.
DIVIDED = (
    "each tensor is divided along its first dimension, which must be that of the samples: train by "
    "train_on_batch, which leaves such a batch whole, or in a strategy by "
    "distribute_datasets_from_function (GRADRING_WITH_STRATEGY)"
)


def give(strategy: Any) -> None:
    """Makes Keras models without a strategy train by this one, from now on."""
    global _strategy, _context_outside
    _strategy, _context_outside = strategy, tf.distribute.get_replica_context()


def strategy() -> Any:
    """The strategy that the program was given, or None."""
    return _strategy


def outside() -> Any:
    """Returns the replica context in which code outside of any strategy runs, to enter it."""
    return _context_outside


def is_in_step(*_: Any) -> bool:
    """Returns whether the code runs in a step of a replica of the given strategy."""
    if _strategy is None or not current().is_in_run:
        return False
    context = tf.distribute.get_replica_context()
    return context is not None and context.strategy is _strategy


def is_outside(*_: Any) -> bool:
    """Returns whether the program was given a strategy, and no scope or step surrounds the code."""
    is_in_run = current().is_in_run
    return _strategy is not None and not is_in_run and not tf.distribute.has_strategy()


def warn_once(key: str, text: str, *args: Any) -> None:
    """Warns on rank 0 of the given strategy, once for each key."""
    once.warn(_strategy.communicator, key, text, *args)


# Loops


def joining(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for functions that compile or begin a loop; adds the model to the strategy."""
    if keras_names.MODEL_STRATEGY.of(model, None) is None:
        keras_names.MODEL_STRATEGY.set(model, _strategy)
    return original(model, *args, **kwargs)


def compiling(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for `compile`; turns XLA off, which has no kernels for collectives."""
    if kwargs.get("jit_compile") is True and _strategy.communicator.world_size > 1:
        kwargs["jit_compile"] = False
        warn_once(
            "jit_compile",
            "jit_compile=True is left out, as XLA has no kernels for reductions between ranks "
            "(GRADRING_WITH_STRATEGY)",
        )
    return joining(original, model, *args, **kwargs)


def begins_equal(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for a loop of Keras; first gives the model's variables the values of rank 0."""
    give_values_of_chief(model)
    return original(model, *args, **kwargs)


def give_values_of_chief(model: Any) -> None:
    """Broadcasts the variables of rank 0 if any differ between ranks; all ranks must call it."""
    communicator = communicator_of(model.distribute_strategy)
    if communicator is None or communicator.world_size == 1:
        return
    variables = [*variables_of(model), *getattr(model, "metrics_variables", ())]
    hashes = np.array([hash_of(contents(each)) for each in variables], np.int64)
    if gather_if_different(communicator, hashes.tobytes(), "variables of a model") is not None:
        broadcast_variables(variables, 0, communicator)


def are_of_loop(batches: Any) -> bool:
    """Returns whether batches come from a (distributed) iterator, as those of `fit` do."""
    return isinstance(batches, (tf.data.Iterator, tf.distribute.DistributedIterator))


def part_of_batch(data: Any) -> tuple[Any, int | None]:
    """Returns this rank's rows of a batch that every rank has, and the batch's number of rows.

    If the batch has leaves that are no tensors, or tensors with different numbers of rows, returns
    the whole batch and None. If the batch has fewer rows than there are ranks, some ranks get none.
    """
    communicator = _strategy.communicator
    leaves = [leaf for leaf in tf.nest.flatten(data) if leaf is not None]
    sizes = {_rows(leaf) for leaf in leaves}
    if len(sizes) != 1:
        return data, None
    (size,) = sizes
    if not size:
        return data, None
    begin, end = ((communicator.rank + more) * size // communicator.world_size for more in (0, 1))
    return tf.nest.map_structure(lambda leaf: None if leaf is None else leaf[begin:end], data), size


def require_rows_of_samples(data: Any) -> None:
    """Requires that all tensors of a rank's part of a batch have as many rows.

    Otherwise their rows are no samples, as in a batch of graphs that is one graph, and its parts do
    not belong together. A graph adds ops for shapes that it does not know.

    Raises:
        gradring.errors.ConfigError: The static shapes have different numbers of rows.
        tf.errors.InvalidArgumentError: The numbers differ when the step runs; `UNEQUAL_ROWS` is its
            message.
    """
    found = [rows for leaf in tf.nest.flatten(data) if (rows := rows_of(leaf)) is not None]
    static = {rows for rows in found if isinstance(rows, int)}
    if len(static) > 1:
        raise ConfigError(f"{UNEQUAL_ROWS} {sorted(static)}", advice=DIVIDED)
    for rows in found[1:]:
        if not (isinstance(rows, int) and isinstance(found[0], int)):
            first = tf.cast(found[0], tf.int64)
            tf.debugging.assert_equal(first, tf.cast(rows, tf.int64), UNEQUAL_ROWS)


def _rows(leaf: Any) -> int | None:
    if isinstance(leaf, (np.ndarray, tf.Tensor)) and leaf.shape:
        return int(leaf.shape[0])
    return None
