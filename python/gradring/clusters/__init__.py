"""Environments that give a process its rank: a small file for each, behind one interface.

====================  ==============================================================
``env``               ``GRADRING_RANK, GRADRING_WORLD_SIZE, GRADRING_RENDEZVOUS``
``tf_config``         ``TF_CONFIG``
``torchrun``          ``RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT``
``jax``               ``JAX_PROCESS_ID, JAX_NUM_PROCESSES, JAX_COORDINATOR_ADDRESS``
``keras``             ``KERAS_DISTRIBUTION_*``, as `keras.distribution.initialize` reads them.
``slurm``             a step started by ``srun``.
``open_mpi``          Open MPI's ``mpirun``; ``pmix`` distributes rank 0's address.
``pmi``               MPICH's and Intel MPI's ``mpiexec``.
``mpi``               other launchers of MPI programs.
``kubeflow``          a node with ``PET_NODE_RANK, PET_NNODES``.
``sagemaker``         a host in ``SM_HOSTS``.
``kubernetes``        a pod of an Indexed Job.
``claims``            places that an ancestor of this process has taken.
``signs``             incomplete variables, with which no process may train alone.
====================  ==============================================================

``detection`` asks the environments in this order, ``cluster`` has the types, and ``own_host`` finds
the address at which other hosts reach this one.
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
