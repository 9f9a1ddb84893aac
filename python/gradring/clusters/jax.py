"""The variables of ``jax.distributed``, as Kubeflow Trainer's JAX runtime sets them."""

from __future__ import annotations

from collections.abc import Mapping

from gradring import parse
from gradring.clusters.cluster import Cluster, Environment
from gradring.errors import ConfigError
from gradring.parse import Place

RANK, SIZE, COORDINATOR = "JAX_PROCESS_ID", "JAX_NUM_PROCESSES", "JAX_COORDINATOR_ADDRESS"


def place(environ: Mapping[str, str]) -> Place | None:
    """The place in ``JAX_PROCESS_ID`` and ``JAX_NUM_PROCESSES``."""
    return parse.place(environ, RANK, SIZE)


def rendezvous(environ: Mapping[str, str]) -> str | None:
    """``JAX_COORDINATOR_ADDRESS``; None when it is unset."""
    text = parse.value(environ, COORDINATOR)
    return None if text is None else parse.address(text, COORDINATOR)


def join(environ: Mapping[str, str], place: Place) -> Cluster:
    """The cluster around ``JAX_COORDINATOR_ADDRESS``, where rank 0 listens."""
    address = parse.given_rendezvous(environ) or rendezvous(environ)
    if address is None and place.world_size > 1:
        raise ConfigError(
            f"{RANK} and {SIZE} are set but {COORDINATOR} is not; "
            "set it to the host:port at which rank 0 listens"
        )
    return Cluster.of(
        place,
        address,
        ENVIRONMENT.source,
        f"{RANK}={place.rank} and {SIZE}={place.world_size} are set.",
    )


ENVIRONMENT = Environment("JAX variables", (RANK, SIZE, COORDINATOR), place, join)
