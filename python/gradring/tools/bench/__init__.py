"""Measuring collectives, with every result checked; behind ``gradring bench``.

====================  ===================================================================
``options``           what is measured: sizes, dtype, op, systems; parsed and checked once
``values``            test values, the exact expectation, and the count of wrong elements
``systems/``          one file per system that can be measured: gradring itself and its peers
``rank``              what every rank runs: rounds over the systems, size by size
``all_reduce``        starts the ranks and prints what they measure
``raw_link``          ``gradring bench link``: the links without a collective
``congestion``        the same TCP congestion control for all systems
``measurement``       one system at one size: p50, p90, p99, algbw and busbw
``comparison``        which measurements may be compared: like with like
``record``            a run: when, where and with what, and its measurements
``table``             measurements and ratios as text
``pictures``          the style of all pictures
====================  ===================================================================
"""
