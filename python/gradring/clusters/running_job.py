"""The running job, if there is one, that a process is to join instead of founding a group."""

from __future__ import annotations

from collections.abc import Sequence

from gradring import _native
from gradring.clusters import Cluster
from gradring.config.values import AUTO, Settings
from gradring.errors import GradringError

#: How long a host may take to answer whether the job runs there.
_ANSWER_S = 2.0
_AT_ONCE = 16


def members_to_join(cluster: Cluster, settings: Settings) -> Sequence[str]:
    """Where members of the running job listen, or nothing if this process is in its first group.

    Args:
        cluster: What the environment says of the first group.
        settings: Those of this process; ``join`` says where to look.
    """
    wanted: Sequence[str] = settings.join or ()
    if AUTO not in wanted:
        return wanted
    # It has hooks for forks, which most programs can do without.
    from concurrent.futures import ThreadPoolExecutor

    known = wanted[1:] or cluster.candidates or cluster.addresses or (cluster.rendezvous,)
    others = [address for address in known if address != cluster.listen]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        runs = list(pool.map(lambda address: _runs_at(address, settings), others))
    # They know of each other.
    return [address for address, is_member in zip(others, runs, strict=True) if is_member]


def _runs_at(address: str, settings: Settings) -> bool:
    """Whether a process that is in a job with this token listens there, and not one that joins."""
    token = settings.token or b""
    try:
        return bool(_native.inquire(address, token, settings.tls, _ANSWER_S)["runs"])
    except GradringError:
        return False
