"""The variables of each rank: ours, and a ``TF_CONFIG`` that says the same."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping

from gradring.clusters import without_cluster_variables
from gradring.launch.ports import LOOPBACK, free_ports

TOKEN_BYTES = 32
THREAD_VARIABLES = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")


def new_token() -> str:
    """A fresh secret for one job; it travels in the environment only."""
    return secrets.token_hex(TOKEN_BYTES)


def rank_environments(
    environ: Mapping[str, str], world_size: int, *, tf_config: bool = True
) -> list[dict[str, str]]:
    """One environment per rank for a world on this machine.

    Each is ``environ`` without the variables of other launchers, plus rank, world size,
    rendezvous and a new token. The cores of this machine are divided among the ranks through
    ``OMP_NUM_THREADS`` and ``TF_NUM_INTRAOP_THREADS``, unless these are set already. Python's
    output is unbuffered, so that no line is lost when a rank dies.

    Args:
        environ: The variables to start from.
        world_size: Number of ranks.
        tf_config: Whether to set an agreeing ``TF_CONFIG``, for scripts that use TensorFlow's own
            strategies; its worker 0 is at the rendezvous.

    Raises:
        OSError: There are not enough free ports.
    """
    base = {**_thread_counts(world_size), "PYTHONUNBUFFERED": "1"}
    base.update(without_cluster_variables(environ))
    base.pop("GRADRING_TOKEN_FILE", None)
    base["GRADRING_TOKEN"] = new_token()
    addresses = [f"{LOOPBACK}:{port}" for port in free_ports(world_size if tf_config else 1)]
    return [
        {
            **base,
            "GRADRING_RANK": str(rank),
            "GRADRING_WORLD_SIZE": str(world_size),
            "GRADRING_RENDEZVOUS": addresses[0],
            **({"TF_CONFIG": _tf_config(addresses, rank)} if tf_config else {}),
        }
        for rank in range(world_size)
    ]


def _tf_config(addresses: list[str], rank: int) -> str:
    return json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}})


def _thread_counts(local_ranks: int) -> dict[str, str]:
    threads = max(1, len(os.sched_getaffinity(0)) // local_ranks)
    return dict.fromkeys(THREAD_VARIABLES, str(threads))
