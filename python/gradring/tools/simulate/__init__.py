"""Simulated times of collectives on machines of any size, by the core's cost model.

``options`` parses and checks, ``simulation`` calls the core and prints, ``picture`` draws.
"""
