"""Measurement of collectives for ``gradring bench``, with every result checked.

====================  ===================================================================
``options``           sizes, dtype, op and systems; parsed and checked once
``values``            test values, the exact expectation, and the count of wrong elements
``systems/``          one file per system that can be measured: gradring itself and its peers
``rank``              the program of every rank: rounds over the systems, size by size
``all_reduce``        starts the ranks and prints their measurements
``raw_link``          ``gradring bench link``: the links without a collective
``network``           simulated hosts, with one TCP congestion control for all systems
``measurement``       one system at one size: p50, p90, p99, algbw and busbw
``comparison``        groups of comparable measurements
``record``            a run: time, machine, versions and measurements
``table``             measurements and ratios as text
``pictures``          the style of all pictures
====================  ===================================================================
"""
