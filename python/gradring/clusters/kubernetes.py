"""A pod of a Kubernetes Job with indexed completions.

Kubernetes tells a pod its index, but not how many there are: ``GRADRING_WORLD_SIZE`` says it. With
a headless service as ``subdomain``, the pods' names are ``JOB-INDEX.SUBDOMAIN``.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import replace

from gradring.clusters.cluster import Cluster, Environment
from gradring.config import parse
from gradring.config.parse import Place
from gradring.errors import ConfigError

INDEX, WORLD_SIZE = "JOB_COMPLETION_INDEX", "GRADRING_WORLD_SIZE"


def place(environ: Mapping[str, str]) -> Place | None:
    """The place of this pod among ``GRADRING_WORLD_SIZE``; of one, it is the only rank."""
    index = parse.value(environ, INDEX)
    if index is None:
        return None
    size = parse.value(environ, WORLD_SIZE)
    if size is None:
        raise ConfigError(
            f"{INDEX}={index} says that this is one pod of an Indexed Job, but not of how many; "
            f"set {WORLD_SIZE} to the Job's completions, or to 1 if each pod trains alone"
        )
    world_size = parse.whole_number(size, WORLD_SIZE, minimum=1, maximum=parse.MAX_WORLD_SIZE)
    number = parse.whole_number(index, INDEX)
    if world_size == 1:
        return Place(0, 1)
    return parse.checked_place(number, world_size, f"{INDEX}={number}", f"{WORLD_SIZE}={size}")


def join(environ: Mapping[str, str], place: Place) -> Cluster:
    """The cluster around the pod with index 0, at the port 29500 or the first of our own."""
    reason = f"{INDEX}={parse.value(environ, INDEX)} and {WORLD_SIZE}={place.world_size} are set."
    given = parse.given_rendezvous(environ)
    if place.world_size == 1 or given is not None:
        return Cluster.of(place, given, ENVIRONMENT.source, reason)
    addresses = _addresses(environ, place)
    # The name of the first pod has those of the Job and its service.
    cluster = Cluster.of(
        place, addresses[0], ENVIRONMENT.source, reason, job_id=f"pods {addresses[0]}"
    )
    # Where the others listen is known if they listen where they are told to.
    told = parse.value(environ, parse.PORT) is not None
    return replace(cluster, addresses=addresses) if told else cluster


# None of these makes a claim by itself; children of a launcher in the pod may need the index.
ENVIRONMENT = Environment("Kubernetes Indexed Job", (), place, join)


def _addresses(environ: Mapping[str, str], place: Place) -> tuple[str, ...]:
    """The names of the pods, which differ in the number at the end of the host, with the port."""
    index = place.rank
    own = parse.value(environ, "HOSTNAME") or socket.gethostname()
    host, dot, domain = socket.getfqdn(own).partition(".")
    stem = host.removesuffix(f"-{index}")
    if not dot or stem == host:
        raise ConfigError(
            f"rank {index} cannot tell the name of the pod with index 0 from its own, "
            f"{host + dot + domain!r}; give the pods a headless service (subdomain: in the pod "
            f"template), or set {parse.RENDEZVOUS} to the host:port at which rank 0 listens"
        )
    port = parse.first_port(environ, parse.DEFAULT_PORT)
    hosts = [f"{stem}-{each}.{domain}" for each in range(place.world_size)]
    return tuple(parse.joined_address(host, port) for host in hosts)
