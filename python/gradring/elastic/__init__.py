"""Commits: copies of a job's values in memory and in files, for the loss of ranks."""

from gradring.elastic.job import run
from gradring.elastic.state import State

__all__ = ["State", "run"]
__dir__ = __all__.copy
