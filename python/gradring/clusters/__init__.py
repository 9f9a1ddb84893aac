"""Environments that tell a process its rank: one small file for each, behind one interface.

====================  ==============================================================
``env``               ``GRADRING_RANK, GRADRING_WORLD_SIZE, GRADRING_RENDEZVOUS``
``tf_config``         ``TF_CONFIG``
``torchrun``          ``RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT``
``jax``               ``JAX_PROCESS_ID, JAX_NUM_PROCESSES, JAX_COORDINATOR_ADDRESS``
``keras``             ``KERAS_DISTRIBUTION_*``, as `keras.distribution.initialize` reads them
``slurm``             a step started by ``srun``
``open_mpi``          Open MPI's ``mpirun``; ``pmix`` hands rank 0's address round
``pmi``               MPICH's and Intel MPI's ``mpiexec``
``mpi``               other launchers of MPI programs
``kubeflow``          a node with ``PET_NODE_RANK, PET_NNODES``
``sagemaker``         a host in ``SM_HOSTS``
``kubernetes``        a pod of an Indexed Job
``claims``            places that an ancestor of this process has taken
``signs``             launchers that tell too little: no process trains alone by accident
====================  ==============================================================

``detection`` asks them in this order; ``cluster`` holds the types, and ``own_host`` knows how
the others reach this host.
"""

from gradring.clusters.cluster import Cluster, Environment
from gradring.clusters.detection import (
    ENVIRONMENTS,
    detect,
    outer_place,
    without_cluster_variables,
)
from gradring.clusters.tf_config import Servers, servers_in
from gradring.config.parse import Place

__all__ = [
    "ENVIRONMENTS",
    "Cluster",
    "Environment",
    "Place",
    "Servers",
    "detect",
    "outer_place",
    "servers_in",
    "without_cluster_variables",
]
