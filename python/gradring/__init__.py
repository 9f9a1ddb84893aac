"""gradring: TCP ring all-reduce for numpy and TensorFlow.

Needs numpy only; TensorFlow is imported by ``gradring.tensorflow`` alone.

    with gradring.init() as comm:
        comm.all_reduce(x, op="mean")
"""

from gradring import errors
from gradring._native import build_info
from gradring.communicator import Communicator, Work
from gradring.errors import GradringError
from gradring.initialize import init

__version__: str = build_info()["version"]

__all__ = ["Communicator", "GradringError", "Work", "__version__", "build_info", "errors", "init"]
