"""Comparisons with pytest-benchmark, which `make bench` runs and records in results/, and programs.

All of them time iterations and count wrong elements as `gradring.tools.bench` does.
"""
