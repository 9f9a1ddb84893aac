"""Kubernetes: a pod of a Job with indexed completions.

Kubernetes gives a pod its index, but not the number of pods, which ``GRADRING_WORLD_SIZE`` must
give. Pods with a headless service as ``subdomain`` have the names ``JOB-INDEX.SUBDOMAIN``.
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
    """Returns the place of this pod among ``GRADRING_WORLD_SIZE`` pods."""
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
    """Returns the cluster around pod 0, at the first of ``GRADRING_PORT`` or 29500."""
    reason = f"{INDEX}={parse.value(environ, INDEX)} and {WORLD_SIZE}={place.world_size} are set."
    given = parse.given_rendezvous(environ)
    if place.world_size == 1 or given is not None:
        return Cluster.of(place, given, ENVIRONMENT.source, reason)
    addresses = _addresses(environ, place)
    # The first pod's name contains the names of the Job and its service.
    cluster = Cluster.of(
        place, addresses[0], ENVIRONMENT.source, reason, job_id=f"pods {addresses[0]}"
    )
    # Addresses of the other ranks are known only if a variable sets their port.
    has_port = parse.value(environ, parse.PORT) is not None
    return replace(cluster, addresses=addresses) if has_port else cluster


# No variable makes a claim by itself; children of a launcher in the pod may need the index.
ENVIRONMENT = Environment("Kubernetes Indexed Job", (), place, join)


def _addresses(environ: Mapping[str, str], place: Place) -> tuple[str, ...]:
    """Returns the addresses of all pods, whose host names differ in the number at the end."""
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
