"""Start of ranks on this and other hosts, with no process left behind.

====================  ===================================================================
``launcher``          the function `launch` behind ``gradring run``: attempts and report
``supervisor``        the loop over processes, and `Policy`, the differences between jobs
``plain``             the policy of ranks that need each other, with restarts of all
``servers``           the policy of a job with parameter servers
``elastic``           the policy of an elastic job
``input_workers``     the policy of tf.data service beside any of these
``input_server``      a process of tf.data service
``slots``             decisions of an elastic job: when and where each worker starts
``watch``             the wait for input, and the times at which processes must end
``question``          a program whose answer is polled, not waited for
``world``             the host, address and variables of each rank
``hosts``             the hosts and their numbers of ranks
``hostfile``          the same, from a file
``program``           the command of the ranks, and its interpreter
``ranks``             the environment variables of each rank
``processes``         rank processes in groups of their own, and ending them
``ssh``               a rank process on another host
``remote_rank``       its far end, which starts the rank there
``collect``           brings parts of a timeline back from other hosts
``tracing``           merges all parts into one timeline
``survey``            checks of the other hosts before the start
``signals``           signals as bytes on a socket
``first_process``     duties of the first process of a container
``guardian``          a helper process that ends ranks when the launcher is killed
``exec_rank``         the first instructions of a rank: die with the launcher, then exec
``output``            whole, prefixed lines from many pipes
``report``            the last words of the rank that failed first
====================  ===================================================================
"""

from gradring.launch.launcher import launch

__all__ = ["launch"]
