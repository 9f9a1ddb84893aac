"""A strategy for programs that make none: scripts that train a model of Keras on one machine.

With ``GRADRING_WITH_STRATEGY=1``, which ``gradring run --with-strategy`` sets, the start hook
(`gradring_start`) imports this module after TensorFlow, and calls `wait_for_layer`. The strategy is
made with the program's first layer: before, the program may configure TensorFlow, and make
datasets.

A program of Keras 3 keeps TensorFlow's variables, and sees one replica: `keras.given` has its
models join the strategy in Keras' loops alone. For one of `tf_keras` the strategy is that of
TensorFlow from there on, with the rules of `tf.distribute.MirroredStrategy`.

A program may speak of `keras.distribution`, too. Keras' TensorFlow backend has no `initialize`,
and trains with a `DataParallel` as without; here the first is gradring's, and the second is what
the strategy does.
"""

from __future__ import annotations

import functools
import logging
import os
import random
import sys
from typing import Any

import numpy as np
import tensorflow as tf

from gradring.clusters import claims, detect, keras
from gradring.errors import ConfigError
from gradring.group import idle
from gradring.group.communicator import Communicator
from gradring.tensorflow.keras import compat_keras, given, summed_losses
from gradring.tensorflow.strategy import CustomCollectiveStrategy

_log = logging.getLogger("gradring")

_is_given = False


class GivenStrategy(CustomCollectiveStrategy):
    """That of a program that knows of no replicas, and is told of one.

    A rank has one replica, on the first of its devices. Variables belong to no strategy.
    """

    is_given = True

    def __init__(self) -> None:
        """Joins the group."""
        gpus = tf.config.list_logical_devices("GPU")
        super().__init__(devices=[gpus[0].name] if gpus else None)

    @property
    def num_replicas_in_sync(self) -> int:
        """As in one process; `extended.replicas` is their number."""
        return 1


def wait_for_layer(module: Any) -> None:
    """Waits for the program's first layer, or model.

    Args:
        module: Where Keras, or `tf_keras`, has just made `Layer`.
    """
    backend = sys.modules.get("keras.src.backend.config")
    is_keras_3 = module.__name__.startswith("keras.")
    if is_keras_3 and backend is not None and backend.backend() != "tensorflow":
        return  # on JAX or PyTorch, in a program that reads by tf.data
    original = module.Layer.__new__

    @functools.wraps(original)
    def first(kind: type, *args: Any, **kwargs: Any) -> Any:
        module.Layer.__new__ = staticmethod(original)
        _give(is_keras_3)
        return original(kind, *args, **kwargs)

    module.Layer.__new__ = staticmethod(first)


def take_place_of_initialize(module: Any) -> None:
    """Has `keras.distribution.initialize` tell gradring what it is told.

    Args:
        module: Of Keras' TensorFlow backend, where `keras.distribution` looks for it.
    """
    module.initialize = _initialize


def _initialize(
    job_addresses: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> None:
    """Says where the group is that the strategy joins, as Keras' variables do.

    Raises:
        ConfigError: A launcher says otherwise; or it comes too late, after the first layer.
    """
    said = {keras.ADDRESSES: job_addresses, keras.SIZE: num_processes, keras.RANK: process_id}
    told = {name: str(value) for name, value in said.items() if value is not None}
    os.environ.update(told)
    cluster = detect()
    strategy = given.strategy() or tf.distribute.get_strategy()
    if not told or not isinstance(strategy, CustomCollectiveStrategy):
        return
    place = strategy.communicator
    if (place.rank, place.world_size) != (cluster.rank, cluster.world_size):
        raise ConfigError(
            f"keras.distribution.initialize makes this process rank {cluster.rank} of "
            f"{cluster.world_size}, but its models have been of rank {place.rank} of "
            f"{place.world_size} since their first layer was made; call initialize before that"
        )


def _give(is_keras_3: bool) -> None:
    """Makes the strategy, and makes it the one that counts from here on."""
    global _is_given
    if _is_given:  # for Keras or `tf_keras`, whichever made the first layer
        return
    _is_given = True
    if tf.distribute.has_strategy():
        _log.warning(
            "this program has a %s of its own, so it gets none (GRADRING_WITH_STRATEGY); if it is "
            "a tf.distribute.MultiWorkerMirroredStrategy, start the program by gradring run "
            "--as-mwms",
            type(tf.distribute.get_strategy()).__name__,
        )
        return
    parent = claims.holder(detect())
    if parent is not None:
        _log.warning(
            "process %d trains alone, because a rank, process %d, has started it",
            os.getpid(),
            parent,
        )
        return
    _check_distribution()
    strategy: CustomCollectiveStrategy
    if is_keras_3:
        strategy = GivenStrategy()
        compat_keras.repair()
        given.give(strategy)
        _give_chance_of_chief(strategy.communicator)
        idle.note_formed(strategy.communicator)
    else:
        strategy = CustomCollectiveStrategy()
        tf.distribute.experimental_set_strategy(strategy)
        summed_losses.warn()
        _keep(strategy)
    place = strategy.communicator
    if place.rank == 0 and place.world_size > 1:
        _log.warning(
            "models of Keras are trained by %d ranks together here (GRADRING_WITH_STRATEGY): each "
            "batch is divided among them",
            place.world_size,
        )


def _give_chance_of_chief(communicator: Communicator) -> None:
    """Has the generators of Python and numpy go on as on rank 0, as in the one process."""
    version, words, gauss = random.getstate()
    state: Any = np.random.get_state(legacy=True)
    kind, keys, position, has_gauss, cached = state
    own = np.array(words, np.int64)
    communicator.broadcast(own, 0, name="the state of Python's random")
    random.setstate((version, tuple(own.tolist()), gauss))
    words_of_numpy = np.array([*keys, position], np.int64)
    communicator.broadcast(words_of_numpy, 0, name="the state of numpy's random")
    *keys, position = words_of_numpy.tolist()
    np.random.set_state((kind, np.array(keys, np.uint32), position, has_gauss, cached))


def _check_distribution() -> None:
    """Refuses, or warns of, what a distribution of Keras asks for and the strategy does not do."""
    module = sys.modules.get("keras.src.distribution.distribution_lib")
    distribution = None if module is None else module.distribution()
    if distribution is None:
        return
    if not getattr(distribution, "auto_shard_dataset", True):
        raise ConfigError(
            f"this program's {type(distribution).__name__} says auto_shard_dataset=False, so each "
            "rank would read data of its own, of whose batches GRADRING_WITH_STRATEGY would drop "
            "the other ranks' parts; give all ranks the same dataset, in whole batches, and leave "
            "auto_shard_dataset out"
        )
    if type(distribution).__name__ != "DataParallel":
        _log.warning(
            "a %s of keras.distribution divides no variables on Keras' TensorFlow backend: each "
            "rank has all of them, and its part of each batch",
            type(distribution).__name__,
        )


def _keep(strategy: CustomCollectiveStrategy) -> None:
    """Sets the strategy again with a new default graph, as of `keras.utils.clear_session`."""
    reset = tf.compat.v1.reset_default_graph

    @functools.wraps(reset)
    def reset_and_set() -> None:
        reset()
        tf.distribute.experimental_set_strategy(strategy)

    tf.compat.v1.reset_default_graph = reset_and_set
