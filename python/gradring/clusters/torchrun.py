"""The variables of ``torchrun`` and of the many launchers that imitate it."""

from __future__ import annotations

from collections.abc import Mapping

from gradring import parse
from gradring.clusters.cluster import Cluster, Environment
from gradring.errors import ConfigError
from gradring.parse import Place

AGENT_STORE, RUN_ID = "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID"


def place(environ: Mapping[str, str]) -> Place | None:
    """The place in ``RANK`` and ``WORLD_SIZE``."""
    return parse.place(environ, "RANK", "WORLD_SIZE")


def rendezvous(environ: Mapping[str, str]) -> str | None:
    """``MASTER_ADDR:MASTER_PORT``, or beside it if ``torchrun`` itself is there; None if unset."""
    master = parse.master_rendezvous(environ)
    if master is None or parse.value(environ, AGENT_STORE) != "True":
        return master
    # torchrun's own agent listens at MASTER_PORT for as long as the job runs: take a neighbour.
    host, _, port = master.rpartition(":")
    neighbour = int(port) + 1 if int(port) < parse.MAX_PORT else int(port) - 1
    return f"{host}:{neighbour}"


def join(environ: Mapping[str, str], place: Place) -> Cluster:
    """The cluster around ``MASTER_ADDR:MASTER_PORT``, which only a world of one may leave out."""
    address = parse.given_rendezvous(environ) or rendezvous(environ)
    if address is None and place.world_size > 1:
        raise ConfigError(
            "RANK and WORLD_SIZE are set but MASTER_ADDR and MASTER_PORT are not; "
            "set them to the host and the port at which rank 0 listens"
        )
    return Cluster.of(
        place,
        address,
        ENVIRONMENT.source,
        f"RANK={place.rank} and WORLD_SIZE={place.world_size} are set.",
        job_id=parse.value(environ, RUN_ID),
    )


ENVIRONMENT = Environment(
    "torch-style variables", ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), place, join
)
