"""gradring: TCP ring all-reduce for numpy and TensorFlow.

Needs numpy only; TensorFlow is imported by ``gradring.tensorflow`` alone.

Examples:
    >>> with gradring.init() as comm:
    ...     comm.all_reduce(np.full(3, rank, np.float32), op="mean")
    array([0.5, 0.5, 0.5], dtype=float32)
    >>> gradring.__version__ == gradring.build_info()["version"]
    True
"""

import importlib
from typing import TYPE_CHECKING, Any

from gradring import errors, stats
from gradring._native import build_info
from gradring.bootstrap import init
from gradring.config import log_lines
from gradring.config.values import TlsFiles
from gradring.errors import GradringError
from gradring.group.arrays import ReduceOp
from gradring.group.collectives import Plan, Work
from gradring.group.communicator import Communicator

if TYPE_CHECKING:
    from gradring.observe.monitor import Monitor

__version__: str = build_info()["version"]
"""Version of the package."""

log_lines.add()

__all__ = [
    "Communicator",
    "GradringError",
    "Monitor",
    "Plan",
    "ReduceOp",
    "TlsFiles",
    "Work",
    "__version__",
    "build_info",
    "errors",
    "init",
    "stats",
]

_LAZY_MODULES = ("elastic", "notebook", "tensorflow", "testing", "updates")
__dir__ = [*__all__, *_LAZY_MODULES].copy


def __getattr__(name: str) -> Any:
    """Imports rarely used modules at their first use, so that programs start sooner.

    So ``gradring.testing`` needs no import line.

    Raises:
        AttributeError: The name does not exist.
    """
    if name in _LAZY_MODULES:
        return importlib.import_module(f"gradring.{name}")
    if name == "Monitor":
        return importlib.import_module("gradring.observe.monitor").Monitor
    raise AttributeError(f"module 'gradring' has no attribute {name!r}")
