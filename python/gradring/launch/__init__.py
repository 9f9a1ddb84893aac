"""Starting ranks here and on other hosts, and never leaving one behind.

====================  ===================================================================
``launcher``          what ``gradring run`` does, as the function `launch`: attempts, report
``supervisor``        the loop over processes, and `Policy`: what jobs differ in
``plain``             the policy of ranks that need each other, perhaps with restarts of all
``servers``           the policy of a job with parameter servers
``elastic``           the policy of an elastic job; asks hosts meanwhile
``input_workers``     the policy of tf.data service beside any of these
``input_server``      a process of tf.data service
``slots``             which worker of an elastic job starts when, and where: decisions
``watch``             the wait for input, and the times at which processes must end
``question``          a program that is asked something, and is not waited for
``world``             which rank runs where, at which address
``hosts``             the hosts and their numbers of ranks
``hostfile``          the same, from a file
``program``           what the ranks run, and under which interpreter
``ranks``             the variables that each rank is given
``processes``         rank processes in groups of their own; how they are ended
``ssh``               a rank process on another host
``remote_rank``       its far end, which starts the rank there
``collect``           brings parts of a timeline back from other hosts
``tracing``           makes one timeline of all parts
``survey``            looks at the other hosts before anything is started
``signals``           signals as bytes on a socket
``first_process``     what the first process of a container does beside
``guardian``          a helper process that ends them when the launcher itself is killed
``exec_rank``         the first instructions of a rank: die with the launcher, then exec
``output``            whole, prefixed lines from many pipes
``report``            the last words of the rank that failed first
====================  ===================================================================
"""

from gradring.launch.launcher import launch

__all__ = ["launch"]
