"""Open MPI: ranks started by ``mpirun``, which needs no other setting.

On one host, rank 0 listens on a port derived from the job. On several hosts, Open MPI 5 distributes
rank 0's address (``pmix``). Open MPI 4 gives only the host of ``mpirun``, where rank 0 is in most
jobs; a rank 0 on another host raises an error at once.
"""

from __future__ import annotations

import re
import socket
import zlib
from collections.abc import Mapping

from gradring.clusters import mpi, own_host, pmix
from gradring.clusters.cluster import of_pair
from gradring.config import parse
from gradring.config.parse import Place
from gradring.errors import ConfigError

RANK, SIZE, LOCAL_SIZE = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
MPIRUN_URI = "OMPI_MCA_orte_hnp_uri"
SOURCE = "Open MPI"
# Above the ports that Linux uses for outgoing connections, as for Slurm.
FIRST_PORT, PORT_COUNT = 61440, 4096


def _rendezvous(environ: Mapping[str, str], place: Place) -> str | None:
    address = parse.master_rendezvous(environ)
    if address is not None or place.world_size == 1:
        return address
    job = parse.value(environ, pmix.JOB)
    if job is None:
        raise mpi.unknown_rendezvous(SOURCE, place)
    port = parse.first_port(environ, FIRST_PORT + zlib.crc32(job.encode()) % PORT_COUNT)
    if parse.value(environ, LOCAL_SIZE) == str(place.world_size):
        return parse.joined_address(own_host.local_host(environ), port)
    if parse.value(environ, MPIRUN_URI) is not None:
        return parse.joined_address(_host_of_mpirun(environ, place), port)
    return pmix.agreed(environ, SOURCE, place)


def _host_of_mpirun(environ: Mapping[str, str], place: Place) -> str:
    """Returns the first address in a URI such as ``1531576320.0;tcp://10.0.0.1,10.1.0.1:34911``."""
    uri = environ[MPIRUN_URI]
    found = re.search(r"tcp://([^,:;]+)|tcp6://\[([^],]+)", uri)
    if found is None:
        raise mpi.unknown_rendezvous(SOURCE, place, f" ({MPIRUN_URI}={uri!r})")
    host = found[1] or found[2]
    if place.rank == 0 and not own_host.is_own(host):
        own = socket.gethostname()
        raise ConfigError(
            f"rank 0 is on {own}, but mpirun runs on {host}, and Open MPI 4 tells the other ranks "
            f"no more than that; add -x {parse.RENDEZVOUS}={own}:29500 to mpirun, or start it on "
            f"{own}"
        )
    return host


ENVIRONMENT = of_pair(
    SOURCE, RANK, SIZE, _rendezvous, also=(LOCAL_SIZE, pmix.RANK), job_name=pmix.JOB
)
