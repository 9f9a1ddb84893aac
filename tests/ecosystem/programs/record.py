"""Notes of a program for the comparison; they know nothing of ranks but their own number.

Programs import it from their own folder, in an environment that has their package and gradring.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import sys
import time
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

PACKAGES = ("tensorflow-cpu", "tensorflow", "keras", "tf_keras", "numpy")


class Record:
    """Weights before and after training, losses, and the times at which epochs end."""

    def __init__(self) -> None:
        self._first: list[np.ndarray] = []
        self._laps: list[float] = []

    def begin(self, weights: Any) -> None:
        """Before training, with a model or variables that have their values."""
        self._first = _arrays(weights)

    def lap(self, *_: Any) -> None:
        """At the end of an epoch; also as a callback of Keras."""
        self._laps.append(time.perf_counter())

    def end(self, weights: Any, losses: Iterable[Any], **more: Any) -> None:
        """After training; writes what was noted, if somebody asks for it.

        Args:
            weights: The same model or variables.
            losses: A number for each epoch.
            **more: Anything else for the table, as JSON.
        """
        directory = os.environ.get("ECOSYSTEM_RECORD")
        if directory is None:
            return
        rank = _rank()
        last = _arrays(weights)
        arrays = {f"first{i}": array for i, array in enumerate(self._first)}
        arrays |= {f"last{i}": array for i, array in enumerate(last)}
        np.savez(f"{directory}/{rank}.npz", **arrays)
        # The first epoch traces and compiles.
        laps = np.diff(self._laps)
        found = {
            "digest": digest(last),
            "losses": [float(loss) for loss in losses],
            "epoch_s": statistics.median(laps) if len(laps) else 0.0,
            "strategy": _strategy(),
            "ranks": _ranks(),
            "versions": {name: _version(name) for name in PACKAGES},
            "more": more,
        }
        with open(f"{directory}/{rank}.json", "w") as file:
            json.dump(found, file)


def digest(arrays: Iterable[np.ndarray]) -> str:
    """The same for the same bits."""
    made = hashlib.sha256()
    for array in arrays:
        made.update(np.ascontiguousarray(array).tobytes())
    return made.hexdigest()[:16]


def _arrays(weights: Any) -> list[np.ndarray]:
    found = weights.get_weights() if hasattr(weights, "get_weights") else weights
    return [np.array(each) for each in found]


def _rank() -> str:
    """As `gradring run`, mpirun or Ray Train tell it; 0 of a process that nobody told."""
    task = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {})
    of_mpi = os.environ.get("OMPI_COMM_WORLD_RANK", task.get("index", 0))
    return str(os.environ.get("GRADRING_RANK", of_mpi))


def _ranks() -> int:
    """How many are in this process' largest group of gradring; 1 of a process without any."""
    from gradring.group.communicator import open_groups

    return max((group.world_size for group in open_groups), default=1)


def _strategy() -> str:
    """The class of the one that counts at the end, for whoever makes no other.

    A program of Keras 3 that knows of no replicas sees none of it.
    """
    import tensorflow as tf

    given = sys.modules.get("gradring.tensorflow.keras.given")
    strategy = (given and given.strategy()) or tf.distribute.get_strategy()
    ours = sys.modules.get("gradring.tensorflow")
    is_ours = ours is not None and isinstance(strategy, ours.CustomCollectiveStrategy)
    return "CustomCollectiveStrategy" if is_ours else type(strategy).__name__


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
