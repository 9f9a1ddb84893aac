"""Ranks started by ``mpirun`` or ``mpiexec``: Open MPI, and PMI as MPICH and Intel MPI set it.

These variables tell the place but not where rank 0 listens, so the address has to be given too.
"""

from __future__ import annotations

from collections.abc import Mapping

from gradring.clusters import parse
from gradring.clusters.cluster import ALONE_RENDEZVOUS, Cluster, Environment, Place
from gradring.errors import ConfigError


def _environment(
    source: str, rank_name: str, size_name: str, job_name: str | None = None
) -> Environment:
    def place(environ: Mapping[str, str]) -> Place | None:
        return parse.place(environ, rank_name, size_name)

    def join(environ: Mapping[str, str], place: Place) -> Cluster:
        rendezvous = parse.given_rendezvous(environ) or parse.master_rendezvous(environ)
        if rendezvous is None and place.world_size > 1:
            raise ConfigError(
                f"{source} says {place}, but not where rank 0 listens; set {parse.RENDEZVOUS} to "
                "host:port (or MASTER_ADDR and MASTER_PORT) for all ranks, for example "
                f"mpirun -x {parse.RENDEZVOUS}=node-a:29500"
            )
        return Cluster(
            place.rank,
            place.world_size,
            rendezvous or ALONE_RENDEZVOUS,
            None,
            source,
            f"{rank_name}={place.rank} and {size_name}={place.world_size} are set.",
            job_id=parse.value(environ, job_name) if job_name else None,
        )

    return Environment(source, (rank_name, size_name), place, join)


OPEN_MPI = _environment(
    "Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMIX_NAMESPACE"
)
PMI = _environment("PMI", "PMI_RANK", "PMI_SIZE")
