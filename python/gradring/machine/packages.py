"""Packages of others that a part of gradring needs: what to install where one is missing."""

from __future__ import annotations

import contextlib
import importlib.util
import platform
from collections.abc import Iterable, Iterator

#: TensorFlow has two packages of this name and version; on other processors, one.
_CPU = "-cpu" if platform.machine() == "x86_64" else ""
#: What to install, by the module that is imported; as pyproject.toml has it.
REQUIREMENTS = {
    "cloudpickle": "cloudpickle>=3",
    "matplotlib": "matplotlib>=3.8",
    "ray": "ray[train]>=2.60",
    "sklearn": "scikit-learn>=1.4",
    "tensorflow": f"tensorflow{_CPU}>=2.16,<2.22",
}
#: Both packages have its files, so one would be unpacked over the other.
_ALSO = ' (with CUDA: "tensorflow>=2.16,<2.22")' if _CPU else ""


def missing(modules: Iterable[str]) -> list[str]:
    """Those that are not installed; nothing is imported."""
    return [module for module in modules if importlib.util.find_spec(module) is None]


def advice(modules: Iterable[str]) -> str:
    """The command that installs them, and nothing over what is there."""
    modules = list(modules)
    wanted = " ".join(f'"{REQUIREMENTS[module]}"' for module in modules)
    return f"pip install {wanted}{_ALSO if 'tensorflow' in modules else ''}"


@contextlib.contextmanager
def needed_by(part: str) -> Iterator[None]:
    """Around the imports of a package that a part of gradring needs.

    Raises:
        ModuleNotFoundError: The package is missing; says how to install it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in REQUIREMENTS:
            raise
        says = f"{error.msg}: {part} needs it; type: {advice([error.name])}"
        raise ModuleNotFoundError(says, name=error.name) from None
