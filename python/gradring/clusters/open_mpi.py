"""Ranks started by Open MPI's ``mpirun``, which needs no other setting.

On one host, rank 0 is at a port that follows from the job. On several, Open MPI 5 hands rank 0's
address round (``pmix``). Open MPI 4 tells where ``mpirun`` runs, and rank 0 is there in most jobs;
where it is not, rank 0 says so at once.
"""

from __future__ import annotations

import re
import socket
import zlib
from collections.abc import Mapping

from gradring import parse
from gradring.clusters import mpi, own_host, pmix
from gradring.clusters.cluster import Cluster, Environment
from gradring.errors import ConfigError
from gradring.parse import Place

RANK, SIZE, LOCAL_SIZE = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
MPIRUN_URI = "OMPI_MCA_orte_hnp_uri"
# As for Slurm: above the ports that Linux hands out for outgoing connections.
FIRST_PORT, PORT_COUNT = 61440, 4096


def place(environ: Mapping[str, str]) -> Place | None:
    """The place in ``OMPI_COMM_WORLD_RANK`` and ``OMPI_COMM_WORLD_SIZE``."""
    return parse.place(environ, RANK, SIZE)


def join(environ: Mapping[str, str], place: Place) -> Cluster:
    """The cluster around the address that is given, or the one that Open MPI lets us find."""
    address = mpi.given(environ)
    if address is None and place.world_size > 1:
        address = _rendezvous(environ, place)
    return Cluster.of(
        place,
        address,
        ENVIRONMENT.source,
        f"{RANK}={place.rank} and {SIZE}={place.world_size} are set.",
        job_id=parse.value(environ, pmix.JOB),
    )


ENVIRONMENT = Environment("Open MPI", (RANK, SIZE, LOCAL_SIZE, pmix.RANK), place, join)


def _rendezvous(environ: Mapping[str, str], place: Place) -> str:
    job = parse.value(environ, pmix.JOB)
    if job is None:
        raise mpi.unknown_rendezvous(ENVIRONMENT.source, place)
    port = parse.first_port(environ, FIRST_PORT + zlib.crc32(job.encode()) % PORT_COUNT)
    if parse.value(environ, LOCAL_SIZE) == str(place.world_size):
        return parse.joined_address(own_host.local_host(environ), port)
    if parse.value(environ, MPIRUN_URI) is not None:
        return parse.joined_address(_host_of_mpirun(environ, place), port)
    return pmix.agreed(environ, ENVIRONMENT.source, place)


def _host_of_mpirun(environ: Mapping[str, str], place: Place) -> str:
    """The first address in a URI such as ``1531576320.0;tcp://10.0.0.1,10.1.0.1:34911``."""
    uri = environ[MPIRUN_URI]
    found = re.search(r"tcp://([^,:;]+)|tcp6://\[([^],]+)", uri)
    if found is None:
        raise mpi.unknown_rendezvous(ENVIRONMENT.source, place, f" ({MPIRUN_URI}={uri!r})")
    host = found[1] or found[2]
    if place.rank == 0 and not own_host.is_own(host):
        own = socket.gethostname()
        raise ConfigError(
            f"rank 0 is on {own}, but mpirun runs on {host}, and Open MPI 4 tells the other ranks "
            f"no more than that; add -x {parse.RENDEZVOUS}={own}:29500 to mpirun, or start it on "
            f"{own}"
        )
    return host
