"""Starting ranks on this machine, and never leaving one behind.

====================  ===================================================================
``launcher``          what ``gradring run`` does, as the function :func:`launch`
``ranks``             the variables that each rank is given
``ports``             free ports for them
``processes``         rank processes in groups of their own; how they are ended
``guardian``          a helper process that ends them when the launcher itself is killed
``exec_rank``         the first instructions of a rank: die with the launcher, then exec
``output``            whole, prefixed lines from many pipes
``report``            the last words of the rank that failed first
====================  ===================================================================
"""

from gradring.launch.launcher import launch

__all__ = ["launch"]
