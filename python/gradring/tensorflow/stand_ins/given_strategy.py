"""A strategy for programs that make none: scripts that train a model of Keras on one machine.

If ``GRADRING_WITH_STRATEGY=1`` is set, as by ``gradring run --with-strategy``, the start hook
(`gradring_start`) imports this module after TensorFlow, and calls `wait_for_layer`. The strategy is
made when the program makes its first layer. Earlier the program may still configure TensorFlow and
make datasets.

A program of Keras 3 keeps plain TensorFlow variables and sees one replica; `keras.given` adds its
models to the strategy inside of Keras' loops only. For a program of `tf_keras`, the strategy
becomes TensorFlow's current one, with the rules of `tf.distribute.MirroredStrategy`.

A program may also use `keras.distribution`. Keras' TensorFlow backend lacks `initialize` and
ignores a `DataParallel`. Gradring provides `initialize`, and the strategy is data-parallel anyway.
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

_OF_TF_KERAS = (
    ", by the rules of MirroredStrategy. Each rank computes losses, masks and clipped gradients of "
    "its own part, so the training may differ from that of one process; models of Keras 3 train as "
    "in one process"
)


class GivenStrategy(CustomCollectiveStrategy):
    """Strategy of a program that knows of no replicas and sees one.

    Each rank has one replica, on its first device. Variables belong to no strategy.
    """

    is_given = True

    def __init__(self) -> None:
        """Joins the group; uses the first GPU, if there is one."""
        gpus = tf.config.list_logical_devices("GPU")
        super().__init__(devices=[gpus[0].name] if gpus else None)

    @property
    def num_replicas_in_sync(self) -> int:
        """One, as in one process; `extended.replicas` is the true number."""
        return 1


def wait_for_layer(module: Any) -> None:
    """Makes the strategy as soon as the program makes its first layer or model.

    Args:
        module: The module of Keras or `tf_keras` that has just defined `Layer`.
    """
    backend = sys.modules.get("keras.src.backend.config")
    is_keras_3 = module.__name__.startswith("keras.")
    if is_keras_3 and backend is not None and backend.backend() != "tensorflow":
        return  # Keras runs on JAX or PyTorch; the program uses TensorFlow only for tf.data
    original = module.Layer.__new__

    @functools.wraps(original)
    def first(kind: type, *args: Any, **kwargs: Any) -> Any:
        module.Layer.__new__ = staticmethod(original)
        _give(is_keras_3)
        return original(kind, *args, **kwargs)

    module.Layer.__new__ = staticmethod(first)


def take_place_of_initialize(module: Any) -> None:
    """Gives Keras' TensorFlow backend an `initialize`, which it lacks.

    Args:
        module: The backend's module in which `keras.distribution` looks up `initialize`.
    """
    module.initialize = _initialize


def _initialize(
    job_addresses: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> None:
    """Sets the environment variables of Keras from which the strategy finds its group.

    Raises:
        ConfigError: A launcher has set other values; or the first layer has already been made.
    """
    said = {keras.ADDRESSES: job_addresses, keras.SIZE: num_processes, keras.RANK: process_id}
    variables = {name: str(value) for name, value in said.items() if value is not None}
    os.environ.update(variables)
    cluster = detect()
    strategy = given.strategy() or tf.distribute.get_strategy()
    if not variables or not isinstance(strategy, CustomCollectiveStrategy):
        return
    place = strategy.communicator
    if (place.rank, place.world_size) != (cluster.rank, cluster.world_size):
        raise ConfigError(
            f"keras.distribution.initialize makes this process rank {cluster.rank} of "
            f"{cluster.world_size}, but its models have been of rank {place.rank} of "
            f"{place.world_size} since their first layer was made; call initialize before that"
        )


def _give(is_keras_3: bool) -> None:
    """Makes the strategy, and makes the program's models use it."""
    global _is_given
    if _is_given:  # Keras and `tf_keras` each call this at their first layer
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
            "models of %s are trained by %d ranks together here (GRADRING_WITH_STRATEGY): each "
            "batch is divided among them%s",
            "Keras" if is_keras_3 else "tf_keras",
            place.world_size,
            "" if is_keras_3 else _OF_TF_KERAS,
        )


def _give_chance_of_chief(communicator: Communicator) -> None:
    """Gives all ranks the state of rank 0's generators of Python and numpy.

    All ranks then draw the same numbers, as one process would.
    """
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
    """Checks a distribution of Keras; the strategy only does `DataParallel`.

    Raises:
        gradring.errors.ConfigError: The ranks would read different data.
    """
    module = sys.modules.get("keras.src.distribution.distribution_lib")
    distribution = None if module is None else module.distribution()
    if distribution is None:
        return
    if not getattr(distribution, "auto_shard_dataset", True):
        raise ConfigError(
            f"this program's {type(distribution).__name__} says auto_shard_dataset=False, so each "
            "rank would read its own batches, and GRADRING_WITH_STRATEGY would drop the other "
            "ranks' parts of them; give all ranks the same dataset, in whole batches, and leave "
            "auto_shard_dataset out"
        )
    if type(distribution).__name__ != "DataParallel":
        _log.warning(
            "a %s of keras.distribution divides no variables on Keras' TensorFlow backend: each "
            "rank has all of them, and its part of each batch",
            type(distribution).__name__,
        )


def _keep(strategy: CustomCollectiveStrategy) -> None:
    """Sets the strategy again in each new default graph, as `clear_session` makes one."""
    reset = tf.compat.v1.reset_default_graph

    @functools.wraps(reset)
    def reset_and_set() -> None:
        reset()
        tf.distribute.experimental_set_strategy(strategy)

    tf.compat.v1.reset_default_graph = reset_and_set
