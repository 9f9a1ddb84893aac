"""The environment variables of each rank: gradring's, and an equivalent ``TF_CONFIG``."""

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
"""Settings of glibc in bytes, which keep the memory of a training step for the next one.

By default glibc returns memory to the kernel after a step and requests it again in the next, page
by page. Gradients wait until their bucket is full, so a rank uses more memory at once than a single
process, and returns more. docs/performance.md has the cost.
"""

PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
"""Variables in which gRPC finds a proxy, even for hosts in the same network."""


def new_token() -> str:
    """Returns a new secret for one job, which is passed in environment variables only."""
    return secrets.token_hex(TOKEN_BYTES)


def rank_environments(
    environ: Mapping[str, str],
    world_size: int,
    *,
    tf_config: bool = True,
    servers: int = 0,
    held: ExitStack | None = None,
) -> list[dict[str, str]]:
    """Returns the environments of all ranks of a world on this machine, then of all servers.

    :func:`thread_counts` divides the cores of this machine among the ranks.

    Args:
        environ: The variables to start from.
        world_size: Number of ranks.
        tf_config: True to also set an equivalent ``TF_CONFIG``, for scripts that use TensorFlow's
            own strategies. Its worker 0 is the rendezvous.
        servers: Number of parameter servers.
        held: Passed to `free_ports`.

    Raises:
        OSError: Too few ports are free.
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
    """Returns the environments of all ranks of a world whose rank 0 listens at ``addresses[0]``.

    Each is ``environ`` without other launchers' variables, plus rank, world size, rendezvous, a new
    job id and a token. The token is that of ``environ``, or a new one. Python's output is
    unbuffered, so that no line is lost when a rank dies.

    Args:
        environ: The variables to start from.
        addresses: ``host:port`` of each rank; with ``tf_config=False`` only the first is needed.
            ``GRADRING_PORT`` replaces the port of rank 0.
        world_size: Number of ranks.
        tf_config: True to set an equivalent ``TF_CONFIG``.
        servers: ``host:port`` of each parameter server. Their environments follow the ranks'; only
            ``TF_CONFIG`` has a server's index.
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
    """Returns the environment of a process that joins the group of a running job.

    Args:
        founder: The environment of a rank of the first group.
        others: ``host:port`` of all possible members of the group.
    """
    return {
        **without_cluster_variables(founder),
        JOB_ID: founder[JOB_ID],
        JOIN: ",".join(others),
    }


def with_defaults(
    environ: Mapping[str, str], local_size: int, hosts: Sequence[str] = ()
) -> dict[str, str]:
    """Returns ``environ`` with defaults for one of `local_size` ranks on this machine.

    The cores are divided among the ranks. :data:`KEPT_MEMORY` is set unless the user has set one of
    its variables or ``GLIBC_TUNABLES``. TensorFlow's servers, such as those of tf.data service, are
    reached on ``hosts`` and this machine without a proxy.
    """
    users = any(name in environ for name in (*KEPT_MEMORY, "GLIBC_TUNABLES"))
    defaults = {**thread_counts(local_size), **({} if users else KEPT_MEMORY)}
    return {**defaults, **environ, **without_proxy(environ, hosts)}


def without_proxy(environ: Mapping[str, str], hosts: Sequence[str]) -> dict[str, str]:
    """Returns the variable that makes gRPC reach this machine and ``hosts`` without a proxy.

    Only gRPC reads this variable. It replaces ``no_proxy``, so it repeats that variable's value. If
    no proxy is set, the result is empty.
    """
    if not any(environ.get(name) for name in PROXIES):
        return {}
    given = environ.get("no_grpc_proxy") or environ.get("no_proxy") or ""
    own = ("localhost", LOOPBACK, "::1", socket.gethostname(), *hosts)
    return {"no_grpc_proxy": ",".join(dict.fromkeys([*filter(None, given.split(",")), *own]))}


def thread_counts(local_size: int) -> dict[str, str]:
    """Returns variables that divide the cores of this machine among `local_size` ranks."""
    threads = max(1, int(cores() / local_size))
    return dict.fromkeys(THREAD_VARIABLES, str(threads))


def tf_config_of(
    addresses: Sequence[str], index: int, servers: Sequence[str] = (), task: str = "worker"
) -> str:
    """Returns ``TF_CONFIG`` for a task in a cluster of workers and perhaps parameter servers."""
    cluster = {"worker": list(addresses), **({SERVER: list(servers)} if servers else {})}
    return json.dumps({"cluster": cluster, "task": {"type": task, "index": index}})
