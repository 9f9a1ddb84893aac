"""Launchers of MPI programs that tell a rank its place, but not where rank 0 is.

Open MPI (``open_mpi``), MPICH and Intel MPI (``pmi``) have ways to find it.
"""

from __future__ import annotations

from collections.abc import Mapping

from gradring import parse
from gradring.clusters.cluster import Cluster, Environment
from gradring.errors import ConfigError
from gradring.parse import Place


def environment(source: str, rank_name: str, size_name: str, job_name: str | None) -> Environment:
    """The launcher with these variables."""

    def place(environ: Mapping[str, str]) -> Place | None:
        return parse.place(environ, rank_name, size_name)

    def join(environ: Mapping[str, str], place: Place) -> Cluster:
        rendezvous = given(environ)
        if rendezvous is None and place.world_size > 1:
            raise unknown_rendezvous(source, place)
        return Cluster.of(
            place,
            rendezvous,
            source,
            f"{rank_name}={place.rank} and {size_name}={place.world_size} are set.",
            job_id=parse.value(environ, job_name) if job_name else None,
        )

    return Environment(source, (rank_name, size_name), place, join)


def given(environ: Mapping[str, str]) -> str | None:
    """The address of rank 0 that the user has set for all ranks; None without one."""
    return parse.given_rendezvous(environ) or parse.master_rendezvous(environ)


def unknown_rendezvous(source: str, place: Place, why: str = "") -> ConfigError:
    """What to set, when the launcher does not tell where rank 0 is."""
    return ConfigError(
        f"{source} says {place}, but not where rank 0 listens{why}; set {parse.RENDEZVOUS} to "
        "host:port (or MASTER_ADDR and MASTER_PORT) for all ranks, for example "
        f"mpirun -x {parse.RENDEZVOUS}=node-a:29500 (Open MPI) or "
        f"mpiexec -genv {parse.RENDEZVOUS} node-a:29500 (MPICH, Intel MPI)"
    )


MVAPICH = environment("MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", None)
JSM = environment("jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "LSB_JOBID")
FLUX = environment("Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_JOB_ID")
