"""Commits: what a job needs to go on after the loss of ranks, in memory and in files."""

from gradring.elastic.run import run
from gradring.elastic.state import State

__all__ = ["State", "run"]
