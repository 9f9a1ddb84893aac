"""Run a function on several ranks of this machine: for our tests, and for yours.

::

    def double_sum():
        with gradring.init() as comm:
            return comm.all_reduce(numpy.ones(3)).tolist()

    assert gradring.testing.run_ranks(double_sum, 2) == [[2.0] * 3] * 2

====================  ===================================================================
``harness``           `run_ranks`: starts the interpreters, waits, judges
``outcome``           what became of a rank, and the exceptions that report it
``function``          how a function is named so that another interpreter finds it
``worker``            what each interpreter runs
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
