"""Random numbers, of which each rank draws its own.

A `keras.random.SeedGenerator` has a state, which all ranks have in common: with it they compare and
save their variables, and go on with other ranks. Drawn as it is, all ranks would have the same
masks of dropout, and the mean of their gradients would vary as that of one rank. So a replica adds
its number, times a constant, to the seed that it takes from the state. The first replica has the
seeds of one process.

In a loop without a strategy, the ranks have a state in common once they have broadcast it.

Random operations of TensorFlow, on which `tf_keras` relies, have two seeds from the program, or
none. In a replica, its number is added to the second in that way. So it is to the key of a
`tf.random.Generator` that was made outside of the strategy.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from gradring.group.communicator import Communicator
from gradring.tensorflow.graph import compat
from gradring.tensorflow.graph.adoption import communicator_of, of_tensorflow
from gradring.tensorflow.graph.fallback import falls_back
from gradring.tensorflow.seams import keras_names
from gradring.tensorflow.seams.table import Replacement, find, replace

#: Odd, so that the replicas' seeds differ; below 2**31, as Keras has seeds.
_APART, _SEEDS = 0x9E3779B1, 2**31

#: Where a variable keeps the ranks that have its value in common.
_SHARED = "_gradring_shared_by"

#: Packages whose draws are replicas' own.
_installed: set[str] = set()


def install() -> None:
    """Has replicas draw their own numbers, if Keras has been imported; later calls do nothing."""
    keras: Any = sys.modules.get("keras")
    # Without this attribute it is still being imported.
    if "keras" in _installed or not hasattr(keras, "callbacks"):
        return
    if keras.backend.backend() != "tensorflow":
        return
    convert = tf.autograph.experimental.do_not_convert
    own = Replacement(keras_names.NEXT_SEED, _next, lambda *_: True, convert)
    # A strategy has refused a Keras without this name; a loop without one can go on.
    with falls_back("a rank's own draw of random numbers", "all ranks draw the same"):
        found = find("keras", [keras_names.NEXT_SEED])
        if found.missing:
            raise LookupError(", ".join(f"{seam} {why}" for seam, why in found.missing.items()))
        replace([found], [own])
    _installed.add("keras")


def install_in_operations() -> None:
    """Has random operations of TensorFlow draw each replica's own; later calls do nothing."""
    if "tensorflow" in _installed:
        return
    own: dict[str, Callable[..., Any]] = {
        "random_seed.get_seed": _op_seeds,
        "Generator._preprocess_key": _key,
    }
    compat.replace({row: own[row] for row in own if compat.has(row)}, traced=True)
    _installed.add("tensorflow")


def note_shared(variables: Iterable[Any], communicator: Communicator) -> None:
    """These variables have the same value on all ranks of the communicator from now on."""
    install()
    for variable in map(of_tensorflow, variables):
        # The replicas of a strategy know their numbers.
        if variable.dtype.is_integer and not isinstance(variable, compat.DistributedValues):
            setattr(variable, _SHARED, weakref.ref(communicator))


def _next(original: Callable[..., Any], generator: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for `SeedGenerator.next`, which returns a seed of two integers."""
    seed = original(generator, *args, **kwargs)
    number = _replica()
    if number is None:
        number = _rank_that_shares(generator)
    if number == 0:
        return seed
    return seed + tf.cast([number * _APART % _SEEDS, 0], seed.dtype)


def _op_seeds(original: Callable[..., Any], op_seed: Any) -> Any:
    """Stands in for `random_seed.get_seed`, which returns two integers, or None twice."""
    seeds = original(op_seed)
    number = _replica()
    if not number or None in seeds:
        return seeds
    first, second = seeds
    return first, (second + number * _APART) % (_SEEDS - 1) or 1


def _key(original: Callable[..., Any], generator: Any, key: Any) -> Any:
    """Stands in for a method of `tf.random.Generator`, which changes keys in its own strategy."""
    number = _replica()
    own = original(generator, key)
    return own + tf.cast(number * _APART, own.dtype) if number and own is key else own


def _replica() -> int | None:
    """The number of the replica of ours that draws; 0 where all draw the same; None: no strategy.

    A strategy of others counts as all draw the same.
    """
    context = tf.distribute.get_replica_context()
    if context is None:
        return 0
    if not tf.distribute.has_strategy():
        return None
    if communicator_of(context.strategy) is None:
        return 0
    return int(tf.get_static_value(context.replica_id_in_sync_group) or 0)


def _rank_that_shares(generator: Any) -> int:
    """The rank that draws, where all have the state in common, or else 0."""
    shared = getattr(of_tensorflow(generator.state), _SHARED, lambda: None)()
    return 0 if shared is None else int(shared.rank)
