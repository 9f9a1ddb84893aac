"""PMIx of Open MPI 5: rank 0 publishes its address, and all ranks read it.

A short-lived process (``pmix_client``) acts as the rank: it loads Open MPI's library and connects.
It has ended before the program may use MPI itself.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from gradring.clusters import mpi, own_host
from gradring.config import parse
from gradring.config.parse import Place
from gradring.errors import RendezvousError

JOB, RANK, SERVER, HOST = "PMIX_NAMESPACE", "PMIX_RANK", "PMIX_SERVER_URI41", "PMIX_HOSTNAME"
CLIENT = Path(__file__).with_name("pmix_client.py")


def agreed(environ: Mapping[str, str], source: str, place: Place) -> str:
    """Returns the ``host:port`` that rank 0 has chosen.

    Raises:
        ConfigError: This process is no rank of ``environ``, or has no library of PMIx.
        RendezvousError: The exchange failed.
    """  # noqa: DOC501 (unknown_rendezvous makes a ConfigError)
    if any(os.environ.get(name) != environ.get(name) for name in (JOB, RANK, SERVER)):
        raise mpi.unknown_rendezvous(source, place, ", which only a rank itself can ask for")
    try:
        return _exchanged(place, parse.value(environ, parse.PORT))
    except FileNotFoundError:
        why = " (there is no libpmix.so.2 beside Open MPI)"
        raise mpi.unknown_rendezvous(source, place, why) from None


@functools.cache
def _exchanged(place: Place, port: str | None) -> str:
    import subprocess  # takes 4 ms, and few ranks need it

    from gradring.config.values import Settings

    timeout_s = Settings.from_environ(os.environ, token=b"-").timeout
    own = ""
    if place.rank == 0:
        name = parse.value(os.environ, HOST)
        own = own_host.free_address(os.environ, name, alone=False)
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", CLIENT, own],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        problem = f"not all ranks have come this far in {timeout_s:g} s"
    else:
        if done.returncode == 0:
            return parse.address(done.stdout, "the address from PMIx")
        if done.returncode == os.EX_UNAVAILABLE:
            raise FileNotFoundError
        problem = done.stderr.strip()[-300:]
    raise RendezvousError(
        f"{place} cannot ask mpirun for the address of rank 0 (PMIx: {problem}); set "
        f"{parse.RENDEZVOUS} to host:port for all ranks",
        rank=place.rank,
    )
