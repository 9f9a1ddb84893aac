"""Variables of ``jax.distributed``, as Kubeflow Trainer's JAX runtime sets them."""

from __future__ import annotations

from collections.abc import Mapping

from gradring.clusters.cluster import of_pair
from gradring.config import parse
from gradring.config.parse import Place

RANK, SIZE, COORDINATOR = "JAX_PROCESS_ID", "JAX_NUM_PROCESSES", "JAX_COORDINATOR_ADDRESS"


def rendezvous(environ: Mapping[str, str], place: Place | None = None) -> str | None:
    """Returns ``JAX_COORDINATOR_ADDRESS``, or None if it is unset."""
    text = parse.value(environ, COORDINATOR)
    return None if text is None else parse.address(text, COORDINATOR)


ENVIRONMENT = of_pair(
    "JAX variables",
    RANK,
    SIZE,
    rendezvous,
    f"{COORDINATOR} is not; set it to the host:port at which rank 0 listens",
    also=(COORDINATOR,),
)
