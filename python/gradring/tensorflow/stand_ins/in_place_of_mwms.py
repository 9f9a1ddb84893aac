"""The strategy for programs that make a `tf.distribute.MultiWorkerMirroredStrategy`.

With ``GRADRING_AS_MWMS=1``, which ``gradring run --as-mwms`` sets, the start hook
(`gradring_start`) calls `install`. TensorFlow's class itself stays: a program may import it by any
name, or ask `isinstance`.
"""

from __future__ import annotations

import logging
from typing import Any

import tensorflow as tf

from gradring.gradients import buckets
from gradring.tensorflow.strategy import CustomCollectiveStrategy

_log = logging.getLogger("gradring")

_MWMS = tf.distribute.MultiWorkerMirroredStrategy
#: The class of older programs, whose arguments are others.
_EXPERIMENTAL = tf.distribute.experimental.MultiWorkerMirroredStrategy
_Options = tf.distribute.experimental.CommunicationOptions

#: Whether the log has it already: some programs make a strategy for each of many trainings.
_said = False


class MultiWorkerMirroredStrategy(CustomCollectiveStrategy):
    """Takes what a program says to `tf.distribute.MultiWorkerMirroredStrategy`."""

    def __init__(self, cluster_resolver: Any = None, communication_options: Any = None) -> None:
        """Joins the group, as `CustomCollectiveStrategy` does.

        Args:
            cluster_resolver: As there.
            communication_options: Of these, `bytes_per_pack` is the size of buckets; the log names
                the others if they are set.
        """
        options = communication_options or _Options()
        bytes_per_pack = options.bytes_per_pack or buckets.DEFAULT_BUCKET_BYTES
        super().__init__(cluster_resolver, communication_options, bucket_bytes=bytes_per_pack)
        _say(self, options)


def install(_: Any) -> None:
    """Has TensorFlow's classes, which it has just made, ask `_new` for their objects."""
    for kind in (_MWMS, _EXPERIMENTAL):
        kind.__new__ = staticmethod(_new)


def _new(kind: type, *args: Any, **kwargs: Any) -> Any:
    """An object of a class, such as gradring's own, or gradring's in the place of TensorFlow's."""
    if kind is _MWMS:
        return object.__new__(MultiWorkerMirroredStrategy)  # Python goes on with its constructor
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
    """Says on rank 0, once, that the program's strategy is another one than it asked for."""
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
