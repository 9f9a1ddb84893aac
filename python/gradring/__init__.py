"""gradring: TCP ring all-reduce for numpy and TensorFlow.

Needs numpy only; TensorFlow is imported by ``gradring.tensorflow`` alone.

    with gradring.init() as comm:
        comm.all_reduce(x, op="mean")
"""

import importlib
from types import ModuleType

from gradring import errors
from gradring._native import build_info
from gradring.communicator import Communicator, Work
from gradring.config import TlsFiles
from gradring.errors import GradringError
from gradring.initialize import init
from gradring.observe.monitor import Monitor

__version__: str = build_info()["version"]

__all__ = [
    "Communicator",
    "GradringError",
    "Monitor",
    "TlsFiles",
    "Work",
    "__version__",
    "build_info",
    "errors",
    "init",
]

_LAZY = ("elastic", "tensorflow", "testing", "updates")


def __getattr__(name: str) -> ModuleType:
    """Imports a submodule when it is first used: ``gradring.testing`` needs no import line."""
    if name in _LAZY:
        return importlib.import_module(f"gradring.{name}")
    raise AttributeError(f"module 'gradring' has no attribute {name!r}")
