"""Ranks for tests: calls of a function on several ranks of this machine.

::

    def double_sum():
        with gradring.init() as comm:
            return comm.all_reduce(numpy.ones(3)).tolist()

    assert gradring.testing.run_ranks(double_sum, 2) == [[2.0] * 3] * 2

====================  ===================================================================
``harness``           `run_ranks`: starts the interpreters, waits, judges
``outcome``           the result or failure of a rank, and the exceptions that report it
``function``          references to functions, which another interpreter can load
``worker``            the program of each interpreter
``network``           hosts with their own network on this machine, for slow and broken links
====================  ===================================================================
"""

from gradring.testing.harness import run_ranks
from gradring.testing.network import Host, simulated_hosts
from gradring.testing.outcome import Outcome, RankFailure, RankTimeout, RemoteError

__all__ = [
    "Host",
    "Outcome",
    "RankFailure",
    "RankTimeout",
    "RemoteError",
    "run_ranks",
    "simulated_hosts",
]
__dir__ = __all__.copy
