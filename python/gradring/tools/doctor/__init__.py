"""``gradring doctor``: checks of the set-up, the network and running jobs.

====================  ===================================================================
``here``              this process: the cluster it would join, interface, versions
``seams``             names of TensorFlow and Keras that gradring needs
``group``             the check on every rank: links of all pairs, clocks, versions
``link_check``        the link between two ranks
``job``               the state of a running or stuck job, and its diagnosis
``running``           the jobs of this user on this machine
``endpoint``          reachability of a ``host:port``
====================  ===================================================================
"""
