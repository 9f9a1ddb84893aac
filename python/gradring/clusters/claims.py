"""Claims of ranks: the processes that a rank starts inherit its variables, and not its place.

A process that has joined the group of its variables records its claim in one more variable. A child
is no rank if it finds its place claimed by a live process. Launchers, shells and debuggers around a
program join no group, so they claim nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from gradring.clusters.cluster import Cluster
from gradring.errors import ConfigError

#: Variable with claims, separated by spaces: process, its start in ticks, rank, rendezvous.
CLAIMS = "GRADRING_CLAIMS"


def holder(cluster: Cluster, environ: Mapping[str, str] = os.environ) -> int | None:
    """Returns the ancestor of this process that has its place in the cluster's group, or None.

    Args:
        cluster: Cluster that this process's variables describe.
        environ: Variables of this process.
    """
    for claim in environ.get(CLAIMS, "").split():
        process, _, rest = claim.partition(":")
        start, _, place = rest.partition(":")
        is_other = place == _place(cluster) and process != str(os.getpid())
        if is_other and start == _start_of(process):
            return int(process)
    return None


def check(cluster: Cluster) -> None:
    """Checks that no ancestor of this process has its place.

    Raises:
        gradring.errors.ConfigError: An ancestor has the place; the message names it.
    """
    process = holder(cluster)
    if process is not None:
        raise ConfigError(
            f"rank {cluster.rank} of the group at {cluster.rendezvous} is process {process}, which "
            f"has started process {os.getpid()} with the same variables; use the communicator "
            "there, or close it before this process starts. To give this process its own group, "
            f"start it without these variables ({cluster.source}) or by `gradring run`",
            rank=cluster.rank,
        )


def claim(cluster: Cluster) -> None:
    """Claims this process's place in the group, in a variable that its children inherit."""
    os.environ[CLAIMS] = f"{os.environ.get(CLAIMS, '')} {_own(cluster)}".strip()


@contextlib.contextmanager
def given_up(cluster: Cluster) -> Iterator[None]:
    """Removes the claim of this process at the end of the block."""
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
    """Returns the start of a process of this machine in ticks, or None if there is none.

    The start distinguishes the process from a later one with the same id.
    """
    try:
        # The text before the last ")" contains the program's name, which may have any characters.
        *_, after = Path("/proc", process, "stat").read_text(errors="replace").rpartition(")")
    except OSError:
        return None
    return after.split()[19]
