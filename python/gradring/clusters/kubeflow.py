"""``PET_*`` variables of Kubeflow Trainer's PyTorch runtime, without ``torchrun``.

The variables are meant for ``torchrun``, which gives each process a rank. A program started by the
pod itself is the only process of its node, so the nodes are the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

from gradring.clusters.cluster import of_pair
from gradring.config import parse
from gradring.config.parse import Place
from gradring.errors import ConfigError

RANK, SIZE = "PET_NODE_RANK", "PET_NNODES"
PREFIX = "PET_"


def place(environ: Mapping[str, str]) -> Place | None:
    """Returns the place of this node among the nodes."""
    if ":" in (parse.value(environ, SIZE) or ""):
        raise ConfigError(
            f"{SIZE}={environ[SIZE]!r} is a range, so this process cannot know how many others "
            "there are; start it with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and "
            "MASTER_PORT"
        )
    return parse.place(environ, RANK, SIZE)


ENVIRONMENT = of_pair(
    "Kubeflow's PET_* variables",
    RANK,
    SIZE,
    # The port is free, because no `torchrun` listens on it.
    lambda environ, place: parse.master_rendezvous(environ, PREFIX),
    f"PET_MASTER_ADDR and PET_MASTER_PORT are not; set {parse.RENDEZVOUS} to the host:port at "
    "which rank 0 listens",
    also=("PET_NPROC_PER_NODE", "PET_MASTER_ADDR", "PET_MASTER_PORT"),
    place=place,
    because=", and no torchrun has given this process a rank: it is the only one of its node.",
)
