"""Random numbers that differ between replicas, from a state that is equal on all ranks.

All ranks have the same state of a `keras.random.SeedGenerator`. Equal states let ranks compare and
save their variables, and continue in a group with other ranks. Equal draws would give all ranks the
same dropout masks, and the mean of their gradients would vary as much as one rank's gradient. So a
replica adds its number, times a constant, to the seed that it takes from the state. The first
replica has the seeds of one process.

In a loop without a strategy, the ranks share a state once they have broadcast it.

Random operations of TensorFlow, on which `tf_keras` relies, have two seeds from the program, or
none. A replica adds its number, times the constant, to the second seed. It also adds the product to
the key of a `tf.random.Generator` that was made outside of the strategy.
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

#: Factor of a replica's number, odd so that all replicas' seeds differ; number of Keras' seeds.
_APART, _SEEDS = 0x9E3779B1, 2**31

#: Attribute of a variable: a weak reference to the communicator whose ranks share its value.
_SHARED = "_gradring_shared_by"

#: Packages whose draws already differ by replica.
_installed: set[str] = set()


def install() -> None:
    """Makes replicas draw different numbers, if Keras has been imported; later calls do nothing."""
    keras: Any = sys.modules.get("keras")
    # Keras has this attribute only when its import has ended.
    if "keras" in _installed or not hasattr(keras, "callbacks"):
        return
    if keras.backend.backend() != "tensorflow":
        return
    convert = tf.autograph.experimental.do_not_convert
    own = Replacement(keras_names.NEXT_SEED, _next, lambda *_: True, convert)
    # A strategy refuses a Keras without this name; a loop without a strategy can continue.
    with falls_back("a rank's own draw of random numbers", "all ranks draw the same"):
        found = find("keras", [keras_names.NEXT_SEED])
        if found.missing:
            raise LookupError(", ".join(f"{seam} {why}" for seam, why in found.missing.items()))
        replace([found], [own])
    _installed.add("keras")


def install_in_operations() -> None:
    """Makes TensorFlow's random operations differ by replica; later calls do nothing."""
    if "tensorflow" in _installed:
        return
    own: dict[str, Callable[..., Any]] = {
        "random_seed.get_seed": _op_seeds,
        "Generator._preprocess_key": _key,
    }
    compat.replace({row: own[row] for row in own if compat.has(row)}, traced=True)
    _installed.add("tensorflow")


def note_shared(variables: Iterable[Any], communicator: Communicator) -> None:
    """Records that these variables have the same value on all ranks of the communicator."""
    install()
    for variable in map(of_tensorflow, variables):
        # A strategy's variables need no mark: in a strategy, the replica has a number.
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
    """Stands in for a method of `tf.random.Generator`.

    The original already changes the key in the strategy in which the generator was made.
    """
    number = _replica()
    own = original(generator, key)
    return own + tf.cast(number * _APART, own.dtype) if number and own is key else own


def _replica() -> int | None:
    """Returns the number of the current replica, or None without a strategy.

    The number is 0 where all ranks must draw the same: between the steps of replicas, and in
    strategies that are not ours.
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
    """Returns this process's rank if the generator's state is shared by the ranks, or else 0."""
    shared = getattr(of_tensorflow(generator.state), _SHARED, lambda: None)()
    return 0 if shared is None else int(shared.rank)
