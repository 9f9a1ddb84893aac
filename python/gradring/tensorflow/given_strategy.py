"""A strategy for programs that make none: scripts that train a model of Keras on one machine.

With ``GRADRING_WITH_STRATEGY=1``, which ``gradring run --with-strategy`` sets, the start hook
(`gradring_start`) imports this module after TensorFlow, so that datasets remember how they are
made, and calls `wait_for_layer`. The strategy is made with the program's first layer and stays:
before, the program may configure TensorFlow, and make datasets.
"""

from __future__ import annotations

import functools
import logging
import sys
from typing import Any

import tensorflow as tf

from gradring.tensorflow import summed_losses
from gradring.tensorflow.strategy import CustomCollectiveStrategy

_log = logging.getLogger("gradring")

_is_given = False


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
        _give()
        return original(kind, *args, **kwargs)

    module.Layer.__new__ = staticmethod(first)


def _give() -> None:
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


def _keep(strategy: CustomCollectiveStrategy) -> None:
    """Sets the strategy again with a new default graph, as of `keras.utils.clear_session`."""
    reset = tf.compat.v1.reset_default_graph

    @functools.wraps(reset)
    def reset_and_set() -> None:
        reset()
        tf.distribute.experimental_set_strategy(strategy)

    tf.compat.v1.reset_default_graph = reset_and_set
