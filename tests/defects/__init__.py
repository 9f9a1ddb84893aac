"""Deliberate defects, each of which the suite has to find: `make defects`."""
