"""Claims of ranks: the processes that a rank starts inherit its variables, and not its place.

A process that has joined the group of its variables says so in one more variable. A child that
finds the same place taken by a process that lives is no rank. A launcher, a shell or a debugger
around a program joins no group, so it claims nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from gradring.clusters.cluster import Cluster
from gradring.errors import ConfigError

#: Claims with spaces between: process, its start in ticks, rank, rendezvous.
CLAIMS = "GRADRING_CLAIMS"


def holder(cluster: Cluster, environ: Mapping[str, str] = os.environ) -> int | None:
    """The other process, an ancestor of this one, that is in the cluster's group at its place.

    Args:
        cluster: What this process' variables describe.
        environ: Its variables.
    """
    for claim in environ.get(CLAIMS, "").split():
        process, _, rest = claim.partition(":")
        start, _, place = rest.partition(":")
        is_other = place == _place(cluster) and process != str(os.getpid())
        if is_other and start == _start_of(process):
            return int(process)
    return None


def check(cluster: Cluster) -> None:
    """Refuses a place that an ancestor of this process has.

    Raises:
        gradring.errors.ConfigError: It has; names it.
    """
    process = holder(cluster)
    if process is not None:
        raise ConfigError(
            f"rank {cluster.rank} of the group at {cluster.rendezvous} is process {process}, which "
            f"has started process {os.getpid()} with the same variables; use the communicator "
            "there, close it before this process starts, or start this process without them "
            f"({cluster.source}) or by `gradring run`, which gives it a group of its own",
            rank=cluster.rank,
        )


def claim(cluster: Cluster) -> None:
    """This process is in the group, at its place; the processes that it starts are told."""
    os.environ[CLAIMS] = f"{os.environ.get(CLAIMS, '')} {_own(cluster)}".strip()


@contextlib.contextmanager
def given_up(cluster: Cluster) -> Iterator[None]:
    """At the end of the block, the process is in the group no longer."""
    yield
    others = [each for each in os.environ.get(CLAIMS, "").split() if each != _own(cluster)]
    os.environ.pop(CLAIMS, None)
    if others:
        os.environ[CLAIMS] = " ".join(others)


def _own(cluster: Cluster) -> str:
    process = str(os.getpid())
    return f"{process}:{_start_of(process)}:{_place(cluster)}"


def _place(cluster: Cluster) -> str:
    return f"{cluster.rank}:{cluster.rendezvous}"


def _start_of(process: str) -> str | None:
    """When a process of this machine began, in ticks, or None where there is none.

    A number is given to another process when the first one has ended.
    """
    try:
        # What is before may contain anything: the name of the program.
        *_, after = Path("/proc", process, "stat").read_text(errors="replace").rpartition(")")
    except OSError:
        return None
    return after.split()[19]
