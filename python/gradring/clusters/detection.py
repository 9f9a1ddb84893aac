"""Detection of this process's cluster: the first environment that matches, without conflicts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import replace

from gradring.clusters import (
    claims,
    env,
    jax,
    keras,
    kubeflow,
    kubernetes,
    mpi,
    open_mpi,
    pmi,
    sagemaker,
    signs,
    slurm,
    tf_config,
    torchrun,
)
from gradring.clusters.cluster import ALONE_RENDEZVOUS, Cluster, Environment
from gradring.config import parse
from gradring.config.parse import Place
from gradring.errors import ConfigError

#: Environments that give this process's place, in the order in which they are asked.
ENVIRONMENTS: tuple[Environment, ...] = (
    env.ENVIRONMENT,
    tf_config.ENVIRONMENT,
    torchrun.ENVIRONMENT,
    jax.ENVIRONMENT,
    keras.ENVIRONMENT,
    slurm.ENVIRONMENT,
    open_mpi.ENVIRONMENT,
    pmi.ENVIRONMENT,
    mpi.MVAPICH,
    mpi.JSM,
    mpi.FLUX,
)

#: Environments that give the place of a host or pod. It is the place of the process if no other
#: environment gives one, because then the process is the only one there.
NODES: tuple[Environment, ...] = (
    kubeflow.ENVIRONMENT,
    sagemaker.ENVIRONMENT,
    kubernetes.ENVIRONMENT,
)


def detect(environ: Mapping[str, str] = os.environ) -> Cluster:
    """Returns the cluster that the environment describes; a single rank if it describes none.

    Args:
        environ: The variables to read.

    Raises:
        ConfigError: An environment is incomplete or malformed, or two of them disagree about the
            rank or the world size, so no process trains alone by accident. Addresses of rank 0 may
            differ; the reason of the cluster names the unused ones.
    """
    found = [
        (environment, place)
        for environment in ENVIRONMENTS
        if (place := environment.place(environ)) is not None
    ]
    found = found or _node(environ)
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


def outer_place(environ: Mapping[str, str]) -> tuple[str, Place] | None:
    """Returns source and place of a launcher that started this process among others, or None."""
    for environment in ENVIRONMENTS + NODES:
        with contextlib.suppress(ConfigError):
            place = environment.place(environ)
            if place is not None and place.world_size > 1:
                return environment.source, place
    return None


def without_cluster_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns a copy in which no environment claims a place, for the children of a launcher."""
    names = {name for environment in ENVIRONMENTS + NODES for name in environment.variables}
    names |= {parse.JOB_ID, parse.JOIN, claims.CLAIMS, *signs.NUMBERS}
    return {name: text for name, text in environ.items() if name not in names}


def _set_variables(environ: Mapping[str, str], environment: Environment) -> str:
    return ", ".join(name for name in environment.variables if parse.value(environ, name))


def _overruled(environ: Mapping[str, str], cluster: Cluster) -> str:
    """Returns a sentence for each given address of rank 0 that is not the rendezvous."""
    if cluster.world_size == 1:
        return ""
    given = [("TF_CONFIG", tf_config.rendezvous(environ))]
    for names, rendezvous in (
        ("MASTER_ADDR and MASTER_PORT", torchrun.rendezvous),
        (jax.COORDINATOR, jax.rendezvous),
        (keras.ADDRESSES, keras.rendezvous),
    ):
        # An incomplete address is not needed; otherwise it would have been refused earlier.
        with contextlib.suppress(ConfigError):
            given.append((names, rendezvous(environ)))
    return "".join(
        f" Rank 0's address in {names}, {address}, does not count."
        for names, address in given
        if address not in (None, cluster.rendezvous)
    )


def _node(environ: Mapping[str, str]) -> list[tuple[Environment, Place]]:
    for environment in NODES:
        place = environment.place(environ)
        if place is not None:
            return [(environment, place)]
    return []


def _alone(environ: Mapping[str, str]) -> Cluster:
    signs.check(environ)
    advice = slurm.advice(environ)
    reason = "no launcher's variables are set, so this process is a world of one."
    if advice is not None:
        reason += f" {advice}"
    return Cluster(0, 1, ALONE_RENDEZVOUS, None, "nothing", reason, advice=advice)
