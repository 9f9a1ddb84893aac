"""``gradring doctor``: finds what is wrong, and where.

====================  ===================================================================
``here``              this process: the cluster it would join, interface, versions
``seams``             names of TensorFlow and Keras that gradring needs
``group``             started on every rank: every pair's link, clocks, versions
``link_check``        the link between two ranks
``job``               the state of a running job, also of a stuck one, and the judgement
``running``           the jobs of this user on this machine
``endpoint``          whether a ``host:port`` can be reached
====================  ===================================================================
"""
