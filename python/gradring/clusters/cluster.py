"""The result of detection, and the interface of the environments that find it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gradring.config import parse
from gradring.config.parse import Place
from gradring.errors import ConfigError

#: The rendezvous of a world of one: no process ever connects to it.
ALONE_RENDEZVOUS = "127.0.0.1:0"


@dataclass(frozen=True)
class Cluster:
    """The group that ``gradring.init()`` joins.

    Attributes:
        rank: Index of this process in the group.
        world_size: Number of processes in the group.
        rendezvous: ``host:port`` at which rank 0 listens.
        listen: ``host:port`` at which this rank listens, where the environment says so
            (``TF_CONFIG`` does); None for a free port on the interface that reaches the rendezvous.
        source: The environment it was found in, such as ``TF_CONFIG``.
        reason: A sentence that tells why that environment was chosen.
        addresses: ``host:port`` of every rank, where the environment tells; for messages.
        candidates: ``host:port`` at which processes of the job may listen, if the environment knows
            their hosts and ports, but not who is where; for those that look for a running job.
        job_id: The launcher's name for the job, which no other job has, where there is one.
        advice: A sentence for a process that probably should not be alone.
    """

    rank: int
    world_size: int
    rendezvous: str
    listen: str | None
    source: str
    reason: str
    addresses: tuple[str, ...] = ()
    candidates: tuple[str, ...] = ()
    job_id: str | None = None
    advice: str | None = None

    @classmethod
    def of(
        cls,
        place: Place,
        rendezvous: str | None,
        source: str,
        reason: str,
        *,
        job_id: str | None = None,
    ) -> Cluster:
        """The group in which a process has this place; only a world of one needs no rendezvous."""
        address = rendezvous or ALONE_RENDEZVOUS
        return cls(place.rank, place.world_size, address, None, source, reason, job_id=job_id)


@dataclass(frozen=True)
class Environment:
    """One way in which a launcher tells a process its place.

    Detection asks every environment for a place, to find conflicts, but only the first one that has
    a place for the addresses: an environment that loses need not know them.

    Attributes:
        source: Name for messages.
        variables: The variables that make up the claim; a launcher removes them from its children.
        place: The place it claims, or None when this environment is not present. Raises
            ConfigError when it is present but incomplete or malformed.
        join: The cluster for that place. Raises ConfigError when the addresses are missing.
    """

    source: str
    variables: tuple[str, ...]
    place: Callable[[Mapping[str, str]], Place | None]
    join: Callable[[Mapping[str, str], Place], Cluster]


def of_pair(
    source: str,
    rank_name: str,
    size_name: str,
    rendezvous: Callable[[Mapping[str, str], Place], str | None],
    missing: str = "",
    *,
    also: tuple[str, ...] = (),
    place: Callable[[Mapping[str, str]], Place | None] | None = None,
    job_name: str = "",
    because: str = ".",
) -> Environment:
    """A launcher that tells the rank and the number of ranks in two variables.

    Args:
        source: Name for messages.
        rank_name: The variable with the rank,
        size_name: and the one with the number of ranks.
        rendezvous: Rank 0's address where ``GRADRING_RENDEZVOUS`` does not say it; None where this
            launcher does not either, which only a world of one can do without.
        missing: What is not set then, and what to type.
        also: Its other variables that make up the claim.
        place: What finds the place, if it is more than reading the two variables.
        job_name: The variable with the name of the job, if there is one.
        because: How the reason ends: that the two variables are set, and what follows from it.
    """

    def join(environ: Mapping[str, str], place: Place) -> Cluster:
        address = parse.given_rendezvous(environ) or rendezvous(environ, place)
        if address is None and place.world_size > 1:
            raise ConfigError(f"{rank_name} and {size_name} are set but {missing}")
        reason = f"{rank_name}={place.rank} and {size_name}={place.world_size} are set{because}"
        job_id = parse.value(environ, job_name)
        return Cluster.of(place, address, source, reason, job_id=job_id)

    def read(environ: Mapping[str, str]) -> Place | None:
        return parse.place(environ, rank_name, size_name)

    return Environment(source, (rank_name, size_name, *also), place or read, join)
