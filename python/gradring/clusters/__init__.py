"""How a process learns its rank: one small file per environment behind one interface.

====================  ==============================================================
``env``               ``GRADRING_RANK, GRADRING_WORLD_SIZE, GRADRING_RENDEZVOUS``
``tf_config``         ``TF_CONFIG``
``torchrun``          ``RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT``
``slurm``             a step started by ``srun``
``mpi``               Open MPI's ``mpirun``, and PMI (MPICH, Intel MPI)
====================  ==============================================================

``detection`` asks them in this order; ``cluster`` holds the types and ``parse`` the shared readers.
"""

from gradring.clusters.cluster import Cluster, Environment, Place
from gradring.clusters.detection import ENVIRONMENTS, detect, without_cluster_variables

__all__ = [
    "ENVIRONMENTS",
    "Cluster",
    "Environment",
    "Place",
    "detect",
    "without_cluster_variables",
]
