"""Horovod's module names, for the start hook (`gradring_start`)."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType

#: Module names relative to ``horovod``, and to ``gradring.horovod`` where these differ.
_ELSEWHERE = {
    ".common": "",
    ".common.basics": ".basics",
    ".common.exceptions": ".tensorflow.elastic",
    ".common.process_sets": ".process_sets",
    ".common.util": ".basics",
    ".keras": ".tensorflow.keras",
    ".keras.callbacks": ".tensorflow.keras.callbacks",
    ".keras.elastic": ".tensorflow.keras.elastic",
    ".tensorflow.functions": ".tensorflow",
    ".tensorflow.mpi_ops": ".tensorflow",
    ".tensorflow.util": ".tensorflow",
}
#: Modules of Horovod that gradring lacks, with words for the error.
_MISSING = {
    ".data": "Horovod's data loaders",
    ".mxnet": "MXNet",
    ".ray": "Horovod on Ray (gradring.ray trains with Ray Train)",
    ".runner": "Horovod's launcher (gradring run, srun and mpirun start ranks)",
    ".spark": "Spark",
    ".torch": "PyTorch",
}


def spec_of(name: str) -> ModuleSpec | None:
    """Returns the import spec of a module of Horovod.

    The module is gradring's own, not a copy. A module of Horovod that gradring lacks is found, but
    its import raises an `ImportError`. Programs expect this behaviour from a Horovod that was built
    without PyTorch.

    Args:
        name: The full name, such as ``horovod.tensorflow.keras``.

    Returns:
        The spec; None for a module that Horovod does not have either.
    """
    place = name.removeprefix("horovod")
    if place in _MISSING:
        return ModuleSpec(name, _Missing(name, _MISSING[place]))
    ours = __package__ + _ELSEWHERE.get(place, place)
    # find_spec imports the parent package, perhaps with TensorFlow; names in the table avoid it.
    is_ours = place in _ELSEWHERE or importlib.util.find_spec(ours) is not None
    return ModuleSpec(name, _Same(ours)) if is_ours else None


def is_theirs_only(name: str) -> bool:
    """Returns True if gradring.horovod lacks a module of Horovod or has it under another name."""
    place = name.removeprefix("horovod")
    return place in _ELSEWHERE or place in _MISSING


class _Same(Loader):
    """A loader that gives a module of gradring a second name."""

    def __init__(self, ours: str) -> None:
        self._ours = ours

    def exec_module(self, module: ModuleType) -> None:
        """Replaces the module in `sys.modules`, from which the import takes its result."""
        sys.modules[module.__name__] = importlib.import_module(self._ours)


class _Missing(Loader):
    """A loader whose error names the missing feature."""

    def __init__(self, name: str, feature: str) -> None:
        self._name, self._feature = name, feature

    def exec_module(self, module: ModuleType) -> None:
        """Raises an `ImportError`."""
        raise ImportError(
            f"there is no {self._name}: gradring takes the place of Horovod (GRADRING_AS_HOROVOD) "
            "with horovod.tensorflow, horovod.tensorflow.keras and horovod.keras, and without "
            f"{self._feature}",
            name=self._name,
        )
