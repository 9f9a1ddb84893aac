"""The variables of each rank: ours, and a ``TF_CONFIG`` that says the same."""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from gradring.clusters import without_cluster_variables
from gradring.clusters.tf_config import SERVER
from gradring.config.parse import JOB_ID, JOIN, at_first_port
from gradring.machine.ports import LOOPBACK, free_ports
from gradring.machine.resources import cores

TOKEN_BYTES, JOB_ID_BYTES = 32, 8
THREAD_VARIABLES = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")
KEPT_MEMORY = {
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TOP_PAD_": str(128 << 20),
}
"""Bytes, for glibc: a process keeps the memory of a training step for the next one.

Otherwise it gives back what a step leaves and asks for it again in the next, page by page.
Gradients wait for each other until a bucket is whole, so more memory is in use at once than in one
process, and more is given back. docs/performance.md has what that costs.
"""

PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
"""Where gRPC finds a proxy, also for hosts beside this one."""


def new_token() -> str:
    """A fresh secret for one job; it travels in the environment only."""
    return secrets.token_hex(TOKEN_BYTES)


def rank_environments(
    environ: Mapping[str, str],
    world_size: int,
    *,
    tf_config: bool = True,
    servers: int = 0,
    held: ExitStack | None = None,
) -> list[dict[str, str]]:
    """One environment per rank for a world on this machine, and then per parameter server.

    The cores of this machine are divided among them by :func:`thread_counts`.

    Args:
        environ: The variables to start from.
        world_size: Number of ranks.
        tf_config: Whether to set an agreeing ``TF_CONFIG``, for scripts that use TensorFlow's own
            strategies; its worker 0 is at the rendezvous.
        servers: Number of parameter servers.
        held: As of `free_ports`.

    Raises:
        OSError: There are not enough free ports.
    """
    listening = world_size if tf_config else 1
    addresses = [f"{LOOPBACK}:{port}" for port in free_ports(listening + servers, held=held)]
    base = {**thread_counts(world_size), **environ}
    own, others = addresses[:listening], addresses[listening:]
    return environments_at(base, own, world_size, tf_config=tf_config, servers=others)


def environments_at(
    environ: Mapping[str, str],
    addresses: Sequence[str],
    world_size: int,
    *,
    tf_config: bool = True,
    servers: Sequence[str] = (),
) -> list[dict[str, str]]:
    """One environment per rank for a world whose rank 0 listens at ``addresses[0]``.

    Each is ``environ`` without the variables of other launchers, plus rank, world size,
    rendezvous, a new job id, and a token: that of ``environ``, if it has one, or a new one.
    Python's output is unbuffered, so that no line is lost when a rank dies.

    Args:
        environ: The variables to start from.
        addresses: ``host:port`` of each rank; with ``tf_config=False`` only the first is needed.
            ``GRADRING_PORT`` replaces the port of rank 0.
        world_size: Number of ranks.
        tf_config: Whether to set an agreeing ``TF_CONFIG``.
        servers: ``host:port`` of each parameter server, whose environments follow: of these, only
            ``TF_CONFIG`` says which process it is.
    """
    base = {"PYTHONUNBUFFERED": "1", **without_cluster_variables(environ)}
    if not base.get("GRADRING_TOKEN") and not base.get("GRADRING_TOKEN_FILE"):
        base["GRADRING_TOKEN"] = new_token()
    job_id = secrets.token_hex(JOB_ID_BYTES)
    base[JOB_ID] = job_id
    addresses = [at_first_port(environ, addresses[0]), *addresses[1:]]
    ranks = [
        {
            **base,
            "GRADRING_RANK": str(rank),
            "GRADRING_WORLD_SIZE": str(world_size),
            "GRADRING_RENDEZVOUS": addresses[0],
            **({"TF_CONFIG": tf_config_of(addresses, rank, servers)} if tf_config else {}),
        }
        for rank in range(world_size)
    ]
    others = [
        {**base, "TF_CONFIG": tf_config_of(addresses, index, servers, SERVER)}
        for index in range(len(servers))
    ]
    return ranks + others


def joining(founder: Mapping[str, str], others: Sequence[str]) -> dict[str, str]:
    """The variables of a process that joins a group which runs, or did.

    Args:
        founder: Those of a rank that began the group.
        others: ``host:port`` of all that may be in the group.
    """
    return {
        **without_cluster_variables(founder),
        JOB_ID: founder[JOB_ID],
        JOIN: ",".join(others),
    }


def with_defaults(
    environ: Mapping[str, str], local_size: int, hosts: Sequence[str] = ()
) -> dict[str, str]:
    """``environ``, and what suits one of so many ranks on this machine where it says nothing.

    The cores are divided among the ranks, and memory is kept, unless a variable of
    :data:`KEPT_MEMORY` or ``GLIBC_TUNABLES`` is set: then all of these are the user's. TensorFlow's
    servers, as of tf.data service, reach ``hosts`` and this machine without a proxy.
    """
    users = any(name in environ for name in (*KEPT_MEMORY, "GLIBC_TUNABLES"))
    defaults = {**thread_counts(local_size), **({} if users else KEPT_MEMORY)}
    return {**defaults, **environ, **without_proxy(environ, hosts)}


def without_proxy(environ: Mapping[str, str], hosts: Sequence[str]) -> dict[str, str]:
    """The variable that keeps gRPC's connections to this machine and ``hosts`` from a proxy.

    It counts for gRPC only, and instead of ``no_proxy``, whose value it repeats. Without a proxy it
    is not needed.
    """
    if not any(environ.get(name) for name in PROXIES):
        return {}
    given = environ.get("no_grpc_proxy") or environ.get("no_proxy") or ""
    own = ("localhost", LOOPBACK, "::1", socket.gethostname(), *hosts)
    return {"no_grpc_proxy": ",".join(dict.fromkeys([*filter(None, given.split(",")), *own]))}


def thread_counts(local_size: int) -> dict[str, str]:
    """Variables that divide the cores of this machine among so many ranks."""
    threads = max(1, int(cores() / local_size))
    return dict.fromkeys(THREAD_VARIABLES, str(threads))


def tf_config_of(
    addresses: Sequence[str], index: int, servers: Sequence[str] = (), task: str = "worker"
) -> str:
    """The variable for a task in a cluster of workers and perhaps parameter servers."""
    cluster = {"worker": list(addresses), **({SERVER: list(servers)} if servers else {})}
    return json.dumps({"cluster": cluster, "task": {"type": task, "index": index}})
