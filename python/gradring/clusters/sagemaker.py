"""Amazon SageMaker: one process on each host of a training job."""

from __future__ import annotations

import json
from collections.abc import Mapping

from gradring.clusters.cluster import Cluster, Environment
from gradring.config import parse
from gradring.config.parse import Place
from gradring.errors import ConfigError

HOSTS, OWN, JOB = "SM_HOSTS", "SM_CURRENT_HOST", "TRAINING_JOB_NAME"


def place(environ: Mapping[str, str]) -> Place | None:
    """Returns the place of ``SM_CURRENT_HOST`` among ``SM_HOSTS``."""
    if parse.value(environ, HOSTS) is None:
        return None
    hosts = _hosts(environ)
    own = parse.value(environ, OWN)
    if own not in hosts:
        raise ConfigError(f"{OWN}={own!r} is not one of {HOSTS}={hosts}; correct them")
    return Place(hosts.index(own), len(hosts))


def join(environ: Mapping[str, str], place: Place) -> Cluster:
    """Returns the cluster around the first host, at the first of ``GRADRING_PORT`` or 29500."""
    port = parse.first_port(environ, parse.DEFAULT_PORT)
    derived = parse.joined_address(_hosts(environ)[0], port)
    address = parse.given_rendezvous(environ) or derived if place.world_size > 1 else None
    reason = f"{OWN} is number {place.rank} of the {place.world_size} in {HOSTS}."
    job_id = parse.value(environ, JOB)
    return Cluster.of(place, address, ENVIRONMENT.source, reason, job_id=job_id)


# The variables describe the host, as on Kubernetes, so children of a launcher may keep them.
ENVIRONMENT = Environment("SageMaker", (), place, join)


def _hosts(environ: Mapping[str, str]) -> list[str]:
    text = environ[HOSTS]
    try:
        hosts = json.loads(text)
    except (ValueError, RecursionError):
        hosts = None
    if not isinstance(hosts, list) or not hosts or not all(isinstance(h, str) for h in hosts):
        raise ConfigError(f"{HOSTS}={parse.shown(text)} is not a JSON list of names; correct it")
    return sorted(set(hosts))
