"""Which cluster this process belongs to: the first environment that matches, none contradicting."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import replace

from gradring.clusters import env, mpi, parse, slurm, tf_config, torchrun
from gradring.clusters.cluster import ALONE_RENDEZVOUS, Cluster, Environment
from gradring.errors import ConfigError

ENVIRONMENTS: tuple[Environment, ...] = (
    env.ENVIRONMENT,
    tf_config.ENVIRONMENT,
    torchrun.ENVIRONMENT,
    slurm.ENVIRONMENT,
    mpi.OPEN_MPI,
    mpi.PMI,
)
"""In the order in which they are asked."""


def detect(environ: Mapping[str, str] = os.environ) -> Cluster:
    """The cluster that the environment describes; a world of one when it describes none.

    Args:
        environ: The variables to read.

    Raises:
        ConfigError: An environment is incomplete or malformed, or two of them disagree about the
            rank or the world size. Training alone by accident is never the answer. Addresses of
            rank 0 may differ; the reason of the cluster names those that do not count.
    """
    found = [
        (environment, place)
        for environment in ENVIRONMENTS
        if (place := environment.place(environ)) is not None
    ]
    if not found:
        return _alone(environ)
    (winner, place), *others = found
    for other, claimed in others:
        if claimed != place:
            raise ConfigError(
                f"this process is {place} according to {winner.source}, but {claimed} according to "
                f"{other.source}; unset the one that is wrong ({_set_variables(environ, winner)}; "
                f"or {_set_variables(environ, other)})",
            )
    cluster = winner.join(environ, place)
    return replace(
        cluster,
        reason=cluster.reason + _overruled(environ, cluster),
        job_id=parse.given_job_id(environ) or cluster.job_id,
    )


def without_cluster_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """A copy in which no environment claims a place, for the children of a launcher."""
    claims = {name for environment in ENVIRONMENTS for name in environment.variables}
    claims.add(parse.JOB_ID)
    return {name: text for name, text in environ.items() if name not in claims}


def _set_variables(environ: Mapping[str, str], environment: Environment) -> str:
    return ", ".join(name for name in environment.variables if parse.value(environ, name))


def _overruled(environ: Mapping[str, str], cluster: Cluster) -> str:
    """A sentence for each address of rank 0 that is given, but is not the rendezvous."""
    if cluster.world_size == 1:
        return ""
    given = [("TF_CONFIG", tf_config.rendezvous(environ))]
    # An address that is incomplete is not needed, or it would have been refused by now.
    with contextlib.suppress(ConfigError):
        given.append(("MASTER_ADDR and MASTER_PORT", torchrun.rendezvous(environ)))
    return "".join(
        f" Rank 0's address in {names}, {address}, does not count."
        for names, address in given
        if address not in (None, cluster.rendezvous)
    )


def _alone(environ: Mapping[str, str]) -> Cluster:
    for name in (parse.RENDEZVOUS, "MASTER_ADDR", "MASTER_PORT"):
        if parse.value(environ, name) is not None:
            wanted = (
                "RANK and WORLD_SIZE"
                if name.startswith("MASTER")
                else "GRADRING_RANK and GRADRING_WORLD_SIZE"
            )
            raise ConfigError(
                f"{name} is set but nothing tells this process its rank; set {wanted}, or unset "
                f"{name} to train alone"
            )
    hint = ""
    tasks = parse.value(environ, slurm.SIZE)
    if tasks not in (None, "1") and parse.value(environ, slurm.STEP) is None:
        hint = f" {slurm.SIZE}={tasks}, but this is no Slurm step; srun would start {tasks} ranks."
    return Cluster(
        0,
        1,
        ALONE_RENDEZVOUS,
        None,
        "nothing",
        f"no launcher's variables are set, so this process is a world of one.{hint}",
    )
