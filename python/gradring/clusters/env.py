"""Our own variables, set by ``gradring run`` or by hand."""

from __future__ import annotations

from collections.abc import Mapping

from gradring import parse
from gradring.clusters import kubernetes
from gradring.clusters.cluster import Cluster, Environment
from gradring.errors import ConfigError
from gradring.parse import Place

RANK, WORLD_SIZE = "GRADRING_RANK", "GRADRING_WORLD_SIZE"


def place(environ: Mapping[str, str]) -> Place | None:
    """The place in ``GRADRING_RANK`` and ``GRADRING_WORLD_SIZE``.

    ``GRADRING_RENDEZVOUS`` alone is no place: it gives other environments their address.
    """
    if parse.value(environ, RANK) is None and parse.value(environ, kubernetes.INDEX) is not None:
        return None  # the index of the pod is its rank, if nothing else is
    return parse.place(environ, RANK, WORLD_SIZE)


def join(environ: Mapping[str, str], place: Place) -> Cluster:
    """The cluster around ``GRADRING_RENDEZVOUS``, which only a world of one may leave out."""
    rendezvous = parse.given_rendezvous(environ)
    if rendezvous is None and place.world_size > 1:
        raise ConfigError(
            f"{RANK} and {WORLD_SIZE} are set but {parse.RENDEZVOUS} is not; "
            f"set it to the host:port at which rank 0 listens"
        )
    return Cluster.of(
        place,
        rendezvous,
        ENVIRONMENT.source,
        f"{RANK}={place.rank} and {WORLD_SIZE}={place.world_size} are set.",
    )


ENVIRONMENT = Environment("GRADRING_* variables", (RANK, WORLD_SIZE, parse.RENDEZVOUS), place, join)
