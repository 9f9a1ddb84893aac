"""Cluster: the result of detection, and the interface of environments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gradring.config import parse
from gradring.config.parse import Place
from gradring.errors import ConfigError

#: Rendezvous of a single rank, to which no process ever connects.
ALONE_RENDEZVOUS = "127.0.0.1:0"


@dataclass(frozen=True)
class Cluster:
    """The group that ``gradring.init()`` joins.

    Attributes:
        rank: Index of this process in the group.
        world_size: Number of processes in the group.
        rendezvous: ``host:port`` at which rank 0 listens.
        listen: ``host:port`` on which this rank listens, where the environment gives one
            (``TF_CONFIG`` does); None for a free port on the interface that reaches the rendezvous.
        source: Name of the environment, such as ``TF_CONFIG``.
        reason: A sentence on why this environment was chosen.
        addresses: ``host:port`` of every rank, where the environment gives them; for messages.
        candidates: ``host:port`` of possible listeners of the job, for processes that look for a
            running job. They are set if the environment gives hosts and ports, but no rank's place.
        job_id: Launcher's name of the job, unique among jobs, where there is one.
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
        """Returns the group of a process at this place; a single rank needs no rendezvous."""
        address = rendezvous or ALONE_RENDEZVOUS
        return cls(place.rank, place.world_size, address, None, source, reason, job_id=job_id)


@dataclass(frozen=True)
class Environment:
    """One way in which a launcher gives a process its place.

    Detection asks every environment for a place, to find conflicts. Only the first one with a place
    is asked for addresses, so the others may lack them.

    Attributes:
        source: Name of the environment for messages.
        variables: Variables that make up the claim; launchers remove them from their children.
        place: Returns the claimed place, or None if the environment is not present. Raises
            ConfigError if it is present but incomplete or malformed.
        join: Returns the cluster for that place. Raises ConfigError if addresses are missing.
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
    """Makes the environment of a launcher that sets rank and number of ranks in two variables.

    Args:
        source: Name of the environment for messages.
        rank_name: Variable with the rank.
        size_name: Variable with the number of ranks.
        rendezvous: Returns rank 0's address if ``GRADRING_RENDEZVOUS`` is unset; None if the
            launcher does not give it either, which is an error except for a single rank.
        missing: End of that error: the missing variable, and a remedy.
        also: Other variables of the claim.
        place: Returns the place, if reading the two variables is not enough.
        job_name: Variable with the name of the job, if there is one.
        because: End of the reason, after the words that both variables are set.
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
