"""Conversion between tf.distribute's cluster resolvers and communicators."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from gradring import errors
from gradring.bootstrap import resolve
from gradring.clusters import Place, Servers, servers_in, tf_config
from gradring.config import parse
from gradring.group.communicator import Communicator, open_groups
from gradring.tensorflow.cluster.mpi_cluster_resolver import MPIClusterResolver
from gradring.tensorflow.graph import compat
from gradring.tensorflow.graph.ops import join_as_guest

EVALUATOR, SERVER = "evaluator", "ps"

_alone: Communicator | None = None

ClusterResolver: TypeAlias = "tf.distribute.cluster_resolver.ClusterResolver"


@dataclass(frozen=True)
class Served:
    """A worker of parameter servers.

    Attributes:
        place: Number of this worker, and number of workers.
        servers: Their parameter servers.
    """

    place: Place
    servers: Servers

    @property
    def name(self) -> str:
        """Name of this worker in messages."""
        return f"worker {self.place.rank} of {self.place.world_size}"


def unless_empty(resolver: ClusterResolver | None) -> ClusterResolver | None:
    """Returns the resolver, or None if it names no tasks.

    A `TFConfigClusterResolver` names no tasks if TF_CONFIG is not set.
    """
    return resolver if resolver is not None and resolver.cluster_spec().as_dict() else None


def servers_of(resolver: ClusterResolver | None) -> Servers:
    """Returns the parameter servers in the user's resolver, or without one, in TF_CONFIG.

    Raises:
        gradring.errors.ConfigError: TF_CONFIG is malformed.
    """
    if resolver is None:
        return servers_in(os.environ)
    cluster = compat.normalize_cluster_spec(resolver.cluster_spec()).as_dict()
    own = resolver.task_id if resolver.task_type == SERVER else None
    return Servers(tuple(cluster.get(SERVER, [])), own, len(_addresses(resolver)))


def served_of(resolver: ClusterResolver | None) -> Served:
    """Returns this worker's place and its servers, without joining a group.

    Raises:
        gradring.errors.ConfigError: The resolver, or the environment, gives no place.
    """
    if resolver is None:
        found = resolve(os.environ)
        return Served(Place(found.rank, found.world_size), servers_of(resolver))
    return Served(Place(*_place_in(resolver)), servers_of(resolver))


def alone() -> Communicator:
    """Returns a group of one, shared by all strategies of a worker that is in no other group."""
    global _alone
    if _alone is None or _alone not in open_groups:
        _alone = Communicator(rank=0, world_size=1)
        open_groups.use_of(_alone).is_stand_in = True
    return _alone


def resolver_of(place: Place) -> ClusterResolver:
    """Returns TF_CONFIG's resolver if it gives this place, or else one with as many workers."""
    if os.environ.get("TF_CONFIG"):
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        own = (place.rank, place.world_size)
        if resolver.cluster_spec().as_dict() and _place_in(resolver) == own:
            return resolver
    # TensorFlow never connects to these addresses: the communicator has connected already.
    workers = [f"rank-{rank}:0" for rank in range(place.world_size)]
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": workers}),
        task_type="worker",
        task_id=place.rank,
        rpc_layer="grpc",
    )


def communicator_of(resolver: ClusterResolver | None) -> Communicator:
    """Joins the group that the user's resolver describes, unless this process is in it.

    Rank 0 is the chief, or else the first worker; its address in the resolver is the rendezvous.
    The environment describes the group if there is no resolver, or if the resolver asked it, too.

    Raises:
        gradring.errors.ConfigError: The resolver names no task for this process.
    """
    return join_as_guest(**_arguments(resolver))


def _arguments(resolver: ClusterResolver | None) -> dict[str, Any]:
    """Returns the arguments of `gradring.init`."""
    if resolver is None or isinstance(resolver, MPIClusterResolver):
        return {}
    rank, world_size = _place_in(resolver)
    place = {"rank": rank, "world_size": world_size}
    if resolver.task_type == EVALUATOR:
        return place
    addresses = _addresses(resolver)
    job_id = parse.given_job_id(os.environ) or tf_config.job_id_of(addresses)
    return {**place, "rendezvous": addresses[0], "listen": addresses[rank], "job_id": job_id}


def check(resolver: ClusterResolver, communicator: Communicator) -> None:
    """Refuses a resolver that contradicts the communicator.

    Raises:
        gradring.errors.ConfigError: The two differ in the rank or in the number of ranks.
    """
    rank, world_size = _place_in(resolver)
    if (rank, world_size) != (communicator.rank, communicator.world_size):
        raise errors.ConfigError(
            f"cluster_resolver makes this process rank {rank} of {world_size}, but the "
            f"communicator on {communicator.host} is rank {communicator.rank} of "
            f"{communicator.world_size}; pass only one of them"
        )


def checked_devices(devices: Sequence[str], communicator: Communicator) -> tuple[str, ...]:
    """Returns the full names of the user's local devices; every rank must call it.

    Raises:
        gradring.errors.ConfigError: The list is empty, a device occurs twice or does not exist, or
            the ranks have different numbers of devices.
    """
    here = f"rank {communicator.rank} of {communicator.host}"
    known = {compat.canonical_device(d.name): d.name for d in tf.config.list_logical_devices()}
    full = tuple(compat.canonical_device(device) for device in devices)
    if not full or len(set(full)) < len(full) or not known.keys() >= set(full):
        raise errors.ConfigError(
            f"devices={list(devices)} on {here}; pass one or more different ones of "
            f"{', '.join(known.values())}"
        )
    counts = communicator.all_gather(np.array([len(full)]), name="number of local devices")
    if (counts != len(full)).any():
        raise errors.ConfigError(
            f"{here} has {len(full)} devices, and the ranks have {counts.tolist()} of them; pass "
            "as many devices= on every rank"
        )
    return full


def _place_in(resolver: ClusterResolver) -> tuple[int, int]:
    """Returns rank and number of ranks; an evaluator is alone, rank 0 of 1."""
    if resolver.task_type == EVALUATOR:
        return 0, 1
    spec = compat.normalize_cluster_spec(resolver.cluster_spec())
    if resolver.task_type not in ("chief", "worker") or resolver.task_id is None:
        raise errors.ConfigError(
            f"cluster_resolver says task_type={resolver.task_type!r}, "
            f"task_id={resolver.task_id!r}; only 'chief' and 'worker' tasks join the group"
        )
    rank = int(compat.id_in_cluster(spec, resolver.task_type, resolver.task_id))
    return rank, len(_addresses(resolver))


def _addresses(resolver: ClusterResolver) -> list[str]:
    cluster = compat.normalize_cluster_spec(resolver.cluster_spec()).as_dict()
    return [*cluster.get("chief", []), *cluster.get("worker", [])]
