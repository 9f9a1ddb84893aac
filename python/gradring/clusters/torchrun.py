"""Variables of ``torchrun`` and of the many launchers that imitate it."""

from __future__ import annotations

from collections.abc import Mapping

from gradring.clusters.cluster import of_pair
from gradring.config import parse
from gradring.config.parse import Place

AGENT_STORE, RUN_ID = "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID"


def rendezvous(environ: Mapping[str, str], place: Place | None = None) -> str | None:
    """Returns ``MASTER_ADDR:MASTER_PORT``, or a neighbouring port under ``torchrun`` itself."""
    master = parse.master_rendezvous(environ)
    if master is None or parse.value(environ, AGENT_STORE) != "True":
        return master
    # torchrun's own agent listens on MASTER_PORT during the whole job.
    host, _, port = master.rpartition(":")
    neighbour = int(port) + 1 if int(port) < parse.MAX_PORT else int(port) - 1
    return f"{host}:{neighbour}"


ENVIRONMENT = of_pair(
    "torch-style variables",
    "RANK",
    "WORLD_SIZE",
    rendezvous,
    "MASTER_ADDR and MASTER_PORT are not; set them to the host and the port at which rank 0 "
    "listens",
    also=("MASTER_ADDR", "MASTER_PORT"),
    job_name=RUN_ID,
)
