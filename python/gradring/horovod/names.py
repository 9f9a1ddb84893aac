"""Horovod's names for modules, for the start hook (`gradring_start`)."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType

#: Names after ``horovod`` there, and after ``gradring.horovod`` here, where these differ.
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
#: What Horovod has, and gradring has not.
_MISSING = {
    ".data": "Horovod's data loaders",
    ".mxnet": "MXNet",
    ".ray": "Horovod on Ray (gradring.ray trains with Ray Train)",
    ".runner": "Horovod's launcher (gradring run, srun and mpirun start ranks)",
    ".spark": "Spark",
    ".torch": "PyTorch",
}


def spec_of(name: str) -> ModuleSpec | None:
    """What `import` needs for a module of Horovod.

    The module is the one of gradring itself, not a copy. Where Horovod has one and gradring has
    not, the module is found, and its import is an `ImportError`: so it is in a Horovod that was
    built without PyTorch, which programs know.

    Args:
        name: Such as ``horovod.tensorflow.keras``.

    Returns:
        None for a module that Horovod does not have either.
    """
    place = name.removeprefix("horovod")
    if place in _MISSING:
        return ModuleSpec(name, _Missing(name, _MISSING[place]))
    ours = __package__ + _ELSEWHERE.get(place, place)
    # To look for a module imports its package, which may be TensorFlow's.
    is_ours = place in _ELSEWHERE or importlib.util.find_spec(ours) is not None
    return ModuleSpec(name, _Same(ours)) if is_ours else None


def is_theirs_only(name: str) -> bool:
    """Whether gradring.horovod has no module of a name of Horovod, or has it elsewhere."""
    place = name.removeprefix("horovod")
    return place in _ELSEWHERE or place in _MISSING


class _Same(Loader):
    """Gives a module its second name."""

    def __init__(self, ours: str) -> None:
        self._ours = ours

    def exec_module(self, module: ModuleType) -> None:
        """Python takes for the module what is in `sys.modules` after this."""
        sys.modules[module.__name__] = importlib.import_module(self._ours)


class _Missing(Loader):
    """Says what is missing."""

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
