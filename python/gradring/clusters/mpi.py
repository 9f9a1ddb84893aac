"""Launchers of MPI programs that give a rank its place, but not rank 0's address.

Open MPI (``open_mpi``), MPICH and Intel MPI (``pmi``) have ways to find the address.
"""

from __future__ import annotations

from collections.abc import Mapping

from gradring.clusters.cluster import Environment, of_pair
from gradring.config import parse
from gradring.config.parse import Place
from gradring.errors import ConfigError


def unknown_rendezvous(source: str, place: Place, why: str = "") -> ConfigError:
    """Returns the error for an unknown address of rank 0, with the variables to set."""
    return ConfigError(
        f"{source} says {place}, but not where rank 0 listens{why}; set {parse.RENDEZVOUS} to "
        "host:port (or MASTER_ADDR and MASTER_PORT) for all ranks, for example "
        f"mpirun -x {parse.RENDEZVOUS}=node-a:29500 (Open MPI) or "
        f"mpiexec -genv {parse.RENDEZVOUS} node-a:29500 (MPICH, Intel MPI)"
    )


def _launcher(source: str, rank_name: str, size_name: str, job_name: str = "") -> Environment:
    def rendezvous(environ: Mapping[str, str], place: Place) -> str | None:
        address = parse.master_rendezvous(environ)
        if address is None and place.world_size > 1:
            raise unknown_rendezvous(source, place)
        return address

    return of_pair(source, rank_name, size_name, rendezvous, job_name=job_name)


MVAPICH = _launcher("MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE")
JSM = _launcher("jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "LSB_JOBID")
FLUX = _launcher("Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_JOB_ID")
