"""Saving and restoring of models and checkpoints, once for all ranks."""
