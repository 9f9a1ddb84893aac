"""Comparisons with pytest-benchmark; `make bench` runs them, and records them in results/."""
