"""Training that survives the loss of ranks, and takes in new ones."""

from gradring.elastic.state import State

__all__ = ["State"]
