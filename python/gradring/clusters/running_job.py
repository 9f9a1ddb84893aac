"""Running job that a process joins instead of founding a group."""

from __future__ import annotations

from collections.abc import Sequence

from gradring import _native
from gradring.clusters import Cluster
from gradring.config.values import AUTO, Settings
from gradring.errors import GradringError

#: Time limit for a host's answer whether the job runs there.
_ANSWER_S = 2.0
_AT_ONCE = 16


def members_to_join(cluster: Cluster, settings: Settings) -> Sequence[str]:
    """Returns addresses of the running job's members; empty if this process founds a group.

    Args:
        cluster: Cluster of the first group, from the environment.
        settings: Settings of this process; ``join`` has the addresses to try.
    """
    wanted: Sequence[str] = settings.join or ()
    if AUTO not in wanted:
        return wanted
    # Imported late, because the module installs hooks for forks.
    from concurrent.futures import ThreadPoolExecutor

    known = wanted[1:] or cluster.candidates or cluster.addresses or (cluster.rendezvous,)
    others = [address for address in known if address != cluster.listen]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        runs = list(pool.map(lambda address: _runs_at(address, settings), others))
    # The list may lack members, because each member knows all others.
    return [address for address, is_member in zip(others, runs, strict=True) if is_member]


def _runs_at(address: str, settings: Settings) -> bool:
    """Returns whether a member of a job with this token listens there, and not a joiner."""
    token = settings.token or b""
    try:
        return bool(_native.inquire(address, token, settings.tls, _ANSWER_S)["runs"])
    except GradringError:
        return False
