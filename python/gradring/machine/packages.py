"""Third-party packages that parts of gradring need, and how to install a missing one."""

from __future__ import annotations

import contextlib
import importlib.util
import platform
from collections.abc import Iterable, Iterator

#: On x86_64, TensorFlow has a smaller package without CUDA, of the same version.
_CPU = "-cpu" if platform.machine() == "x86_64" else ""
#: Requirements by the imported module, equal to those of pyproject.toml.
REQUIREMENTS = {
    "cloudpickle": "cloudpickle>=3",
    "matplotlib": "matplotlib>=3.8",
    "ray": "ray[train]>=2.60",
    "sklearn": "scikit-learn>=1.4",
    "tensorflow": f"tensorflow{_CPU}>=2.16,<2.22",
}
#: Alternative for CUDA. Both packages contain the same files, so only one may be installed.
_ALSO = ' (with CUDA: "tensorflow>=2.16,<2.22")' if _CPU else ""


def missing(modules: Iterable[str]) -> list[str]:
    """Returns the modules that are not installed, without importing any."""
    return [module for module in modules if importlib.util.find_spec(module) is None]


def advice(modules: Iterable[str]) -> str:
    """Returns the command that installs these modules and replaces no installed package."""
    modules = list(modules)
    wanted = " ".join(f'"{REQUIREMENTS[module]}"' for module in modules)
    return f"pip install {wanted}{_ALSO if 'tensorflow' in modules else ''}"


@contextlib.contextmanager
def needed_by(part: str) -> Iterator[None]:
    """Adds advice to a failed import of a package that ``part`` of gradring needs.

    Raises:
        ModuleNotFoundError: The package is missing; the message has the command to install it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in REQUIREMENTS:
            raise
        says = f"{error.msg}: {part} needs it; type: {advice([error.name])}"
        raise ModuleNotFoundError(says, name=error.name) from None
