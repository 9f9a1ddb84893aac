"""Saving and restoring once for all ranks."""
