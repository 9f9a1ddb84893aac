"""Variables of gradring itself, set by ``gradring run`` or by hand."""

from __future__ import annotations

from collections.abc import Mapping

from gradring.clusters import kubernetes
from gradring.clusters.cluster import of_pair
from gradring.config import parse
from gradring.config.parse import Place

RANK, WORLD_SIZE = "GRADRING_RANK", "GRADRING_WORLD_SIZE"


def place(environ: Mapping[str, str]) -> Place | None:
    """Returns the place in ``GRADRING_RANK`` and ``GRADRING_WORLD_SIZE``.

    ``GRADRING_RENDEZVOUS`` alone gives no place; it sets the address for other environments.
    """
    if parse.value(environ, RANK) is None and parse.value(environ, kubernetes.INDEX) is not None:
        return None  # the pod's index is its rank
    return parse.place(environ, RANK, WORLD_SIZE)


ENVIRONMENT = of_pair(
    "GRADRING_* variables",
    RANK,
    WORLD_SIZE,
    lambda environ, place: None,
    f"{parse.RENDEZVOUS} is not; set it to the host:port at which rank 0 listens",
    also=(parse.RENDEZVOUS,),
    place=place,
)
