"""The strategy for programs that make a `tf.distribute.MultiWorkerMirroredStrategy`.

If ``GRADRING_AS_MWMS=1`` is set, as by ``gradring run --as-mwms``, the start hook
(`gradring_start`) calls `install`. TensorFlow's class itself stays in place, because a program may
import it by any name, or use it in `isinstance`.
"""

from __future__ import annotations

import logging
from typing import Any

import tensorflow as tf

from gradring.gradients import buckets
from gradring.tensorflow.strategy import CustomCollectiveStrategy

_log = logging.getLogger("gradring")

_MWMS = tf.distribute.MultiWorkerMirroredStrategy
#: Class used by older programs; its constructor takes other arguments.
_EXPERIMENTAL = tf.distribute.experimental.MultiWorkerMirroredStrategy
_Options = tf.distribute.experimental.CommunicationOptions

#: True once the warning was logged: some programs make a strategy for each of many trainings.
_said = False


class MultiWorkerMirroredStrategy(CustomCollectiveStrategy):
    """Takes the arguments of `tf.distribute.MultiWorkerMirroredStrategy`."""

    def __init__(self, cluster_resolver: Any = None, communication_options: Any = None) -> None:
        """Joins the group, as `CustomCollectiveStrategy` does.

        Args:
            cluster_resolver: As for `CustomCollectiveStrategy`.
            communication_options: Only `bytes_per_pack` is used, as the size of buckets; a warning
                names other options that are set.
        """
        options = communication_options or _Options()
        bytes_per_pack = options.bytes_per_pack or buckets.DEFAULT_BUCKET_BYTES
        super().__init__(cluster_resolver, communication_options, bucket_bytes=bytes_per_pack)
        self.extended.builds_from_batch = True
        _say(self, options)


def install(_: Any) -> None:
    """Makes TensorFlow's two strategy classes create gradring's strategy instead."""
    for kind in (_MWMS, _EXPERIMENTAL):
        kind.__new__ = staticmethod(_new)


def _new(kind: type, *args: Any, **kwargs: Any) -> Any:
    """Creates gradring's strategy for TensorFlow's classes, and plain objects for subclasses."""
    if kind is _MWMS:
        return object.__new__(MultiWorkerMirroredStrategy)  # Python then calls its constructor
    if kind is _EXPERIMENTAL:
        return _of_experimental(*args, **kwargs)
    if not issubclass(kind, CustomCollectiveStrategy):
        _log.warning(
            "%s.%s inherits from tf.distribute.MultiWorkerMirroredStrategy, and is not replaced "
            "(GRADRING_AS_MWMS): let it inherit from gradring.tensorflow.CustomCollectiveStrategy",
            kind.__module__,
            kind.__qualname__,
        )
    return object.__new__(kind)


def _of_experimental(
    communication: Any = None, cluster_resolver: Any = None
) -> MultiWorkerMirroredStrategy:
    options = _Options() if communication is None else _Options(implementation=communication)
    return MultiWorkerMirroredStrategy(cluster_resolver, options)


def _say(strategy: CustomCollectiveStrategy, options: Any) -> None:
    """Warns on rank 0, once, that the strategy was replaced, and which options are ignored."""
    global _said
    place = strategy.communicator
    if _said or place.rank != 0:
        return
    _said = True
    automatic = tf.distribute.experimental.CommunicationImplementation.AUTO
    ignored = {
        "implementation": options.implementation not in (None, automatic),
        "timeout_seconds": options.timeout_seconds is not None,
    }
    names = " and ".join(name for name, is_set in ignored.items() if is_set)
    _log.warning(
        "tf.distribute.MultiWorkerMirroredStrategy is gradring's CustomCollectiveStrategy here "
        "(GRADRING_AS_MWMS), on %d ranks%s",
        place.world_size,
        f"; it has its own choice of {names}" if names else "",
    )
