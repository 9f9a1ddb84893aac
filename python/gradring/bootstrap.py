"""``gradring.init()``: finds the cluster, reads the settings, joins the group."""

from __future__ import annotations

import inspect
import logging
import os
import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING

from gradring.clusters import Cluster, claims, detect
from gradring.clusters.running_job import members_to_join
from gradring.config import parse
from gradring.config.settings import PREFIX, READ, SETTINGS, takes_settings
from gradring.config.values import Settings, TlsFiles, Transport, WireDtype, check_token
from gradring.config.words import did_you_mean, meant
from gradring.errors import ConfigError, GradringError
from gradring.group import forks, idle
from gradring.group.communicator import (
    Communicator,
    around_close,
    core_of,
    formed,
    open_groups,
)
from gradring.group.open_groups import Membership
from gradring.observe.observer import observe
from gradring_start import watch_for_training_alone

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from gradring._native import Options

#: Locks by rank, world size and rendezvous. If several threads join one group, the first forms it.
_turns: dict[tuple[int, int, str], AbstractContextManager[bool]] = {}
# A forked child does not have the threads that hold the locks.
os.register_at_fork(after_in_child=_turns.clear)

_PACKAGE = str(Path(__file__).parents[1]) + os.sep


@takes_settings
def init(
    *,
    rank: int | None = None,
    world_size: int | None = None,
    rendezvous: str | None = None,
    listen: str | None = None,
    announce: str | None = None,
    token: bytes | str | None = None,
    require_auth: bool | None = None,
    tls: TlsFiles | None = None,
    interface: str | None = None,
    port: int | str | None = None,
    transport: Transport | None = None,
    timeout: float | None = None,
    algorithm: str | None = None,
    reproducible: bool | None = None,
    wire_dtype: WireDtype | None = None,
    job_id: str | None = None,
    join: str | Sequence[str] | None = None,
    **settings: Unpack[Options],
) -> Communicator:
    """Joins the group described by the arguments or the environment.

    Without arguments, the cluster is detected from the environment. ``GRADRING_*`` variables,
    ``TF_CONFIG``, and the variables of torchrun, JAX and Keras are recognized. So are Slurm steps,
    Open MPI, MPICH, Intel MPI, Kubeflow (``PET_*``), SageMaker and Kubernetes Indexed Jobs. A
    single process is a world of one. ``gradring env`` prints the same decision. An argument takes
    precedence over a variable. ``GRADRING_LOG`` sets the level of the logger ``gradring``.

    If this process has joined the group before, by ``init()`` or a strategy, it gets the same
    communicator. The communicator stays open until it has been closed once for each ``init()`` that
    returned it. If a strategy formed it, it stays open to the end of the process. A group that has
    failed is closed, and a new one is formed. For a second group of the same ranks, give another
    ``rendezvous``.

    Args:
        rank: This process's index; requires ``world_size``.
        world_size: Number of processes, at most 2048; requires ``rank``.
        rendezvous: ``host:port`` at which rank 0 listens. Without ``rank``, it only replaces the
            rendezvous of the detected cluster.
        listen: ``host:port`` at which this rank listens; by default a free port, or the address in
            ``TF_CONFIG``.
        port: The port at which this rank listens, or a range for firewalls, such as
            ``"29500-29515"``, of which it takes the first free port. Default: ``GRADRING_PORT``, or
            any port. Rank 0 listens at the rendezvous; if the launcher sets no port for it, at the
            first of these. ``listen`` and the addresses in ``TF_CONFIG`` have ports of their own.
        announce: ``host:port`` at which the others reach this rank, if it differs from ``listen``,
            for example behind a forwarded port.
        token: The job's shared secret; default ``GRADRING_TOKEN`` or ``GRADRING_TOKEN_FILE``.
        require_auth: Refuse to join without a token; default ``GRADRING_REQUIRE_AUTH``.
        tls: Certificates for TLS between all ranks; default ``GRADRING_TLS_CA``,
            ``GRADRING_TLS_CERT`` and ``GRADRING_TLS_KEY``, or no TLS.
        interface: Name or IP address of the network interface on which this rank listens; default
            ``GRADRING_INTERFACE``, or the interface of the rendezvous or of ``listen``.
        transport: ``auto``, ``tcp`` or ``shm``; default ``GRADRING_TRANSPORT``, or ``auto``.
        timeout: Time limit for forming the group in seconds; default ``GRADRING_TIMEOUT_S``, or
            300.
        algorithm: The all-reduce algorithm; ``auto`` chooses by size; default
            ``GRADRING_ALGORITHM``, or ``auto``.
        reproducible: Sum in rank order, for every algorithm and number of streams; default
            ``GRADRING_REPRODUCIBLE``, or False.
        wire_dtype: Dtype of float32 elements on the wire in reductions of 64 KiB and more,
            ``bfloat16`` or ``float16``; default ``GRADRING_WIRE_DTYPE``, or no rounding.
        job_id: Identifier that separates this job from others at the same addresses; ranks with
            different identifiers do not form a group. Default: ``GRADRING_JOB_ID``, or the
            launcher's job id, if any.
        join: Addresses of an elastic job that is perhaps already running (`gradring.elastic.run`).
            Either ``host:port`` of its members; or ``auto``, to try the cluster's addresses; or
            ``auto,host:port,...``, to try these. If a member answers, this process is alone until
            `gradring.elastic.run` has joined the job. If none answers, ``auto`` forms the first
            group. Default: ``GRADRING_JOIN``, or no job to join.
        streams: TCP connections with each peer, 1 to 16, for networks in which a single connection
            cannot fill the link; default ``GRADRING_STREAMS``, or 1.
        checksum: Detect bytes corrupted by a link, which then raise a `ProtocolError` on every rank
            instead of giving a wrong result; default ``GRADRING_CHECKSUM``, or False.
        rack: Name of this rank's rack, at most 24 characters. Hosts with the same name share one
            uplink. Default: ``GRADRING_RACK``, or unknown.
        stall_timeout: Seconds without progress after which a collective fails although all ranks
            are alive. Give more than the longest evaluation or saving of one rank during which the
            others wait. Default: ``GRADRING_STALL_TIMEOUT_S``, or 1800.
        stall_warning: Seconds without progress in a collective after which the log (logger
            ``gradring``, by default stderr) names the late ranks, again at doubled intervals.
            Default: ``GRADRING_STALL_WARNING_S``, or 30.

    Returns:
        The connected communicator; close it, or use it in a ``with`` statement.

    Raises:
        ConfigError: The cluster or a setting is invalid; or this process has already joined the
            group with other settings.
        RendezvousError: The group did not form in time; names the missing ranks.
        AuthenticationError: A peer does not know the token, or has no certificate that this rank
            accepts.

    Examples:
        >>> with gradring.init() as comm:
        ...     print(f"rank {comm.rank} of {comm.world_size}")
        ...     comm.all_reduce(np.full(3, comm.rank, np.float32), op="mean")
        rank 0 of 2
        array([0.5, 0.5, 0.5], dtype=float32)
    """
    arguments = {**locals(), **settings}
    given = {
        name: arguments[name] for name in {**READ, **settings} if arguments.get(name) is not None
    }
    try:
        _warn_of_misspelt_variables()
        cluster = resolve(
            os.environ,
            rank=rank,
            world_size=world_size,
            rendezvous=rendezvous,
            port=port,
            join=join,
        )
        wanted = Settings.from_environ(os.environ, **given)
        if job_id is not None:
            cluster = replace(cluster, job_id=job_id)
        turn = _turns.setdefault((cluster.rank, cluster.world_size, cluster.rendezvous), RLock())
        with turn:
            return _joined(cluster, wanted, given, listen, announce)
    except GradringError as error:
        # The message is complete; gradring's part of the traceback would add 20 lines.
        raise error.with_traceback(None) from None


def _joined(
    cluster: Cluster,
    wanted: Settings,
    given: Collection[str],
    listen: str | None,
    announce: str | None,
) -> Communicator:
    """Returns the open group of this place, or forms it; called by one thread at a time."""
    present = _existing(cluster)
    if present is not None:
        membership, communicator = present
        membership.check(wanted, given)
        open_groups.use_of(communicator).users += 1
        return communicator
    if cluster.world_size > 1:
        forks.check_not_held(cluster.rendezvous, cluster.rank)
        claims.check(cluster)
    _check_guards(cluster, wanted)
    if cluster.advice is not None:
        _warn(f"this process trains alone: {cluster.advice}")
    if wanted.log is not None:
        logging.getLogger("gradring").setLevel(wanted.log)

    members = members_to_join(cluster, wanted)
    membership = Membership(cluster, wanted, members)
    if members and cluster.job_id is None:
        cluster = replace(cluster, job_id=parse.given_job_id(os.environ))
    rank, world_size = (0, 1) if members else (cluster.rank, cluster.world_size)
    check_token(rank, world_size, wanted.token, wanted.require_auth)
    config = wanted.for_core(
        listen=parse.address(listen, "listen") if listen is not None else cluster.listen,
        announce=parse.address(announce, "announce") if announce is not None else None,
        job_id=cluster.job_id,
    )
    with _ending_with_the_job(wanted):
        communicator = formed(config, rank, world_size, cluster.rendezvous, cluster.addresses)
    open_groups.use_of(communicator).membership = membership
    if membership.cluster.world_size > 1:
        claims.claim(membership.cluster)
        watch_for_training_alone()
        around_close(communicator, claims.given_up(membership.cluster))
        around_close(communicator, idle.warns(communicator))
    try:
        observe(communicator, wanted)
    except BaseException:  # Ctrl-C, too: nothing else can close it
        communicator.close()
        raise
    return communicator


def _existing(cluster: Cluster) -> tuple[Membership, Communicator] | None:
    """Returns the open communicator of this place; closes it and returns None if it has failed."""
    for communicator in open_groups:
        use = open_groups.use_of(communicator)
        if use.membership is not None and use.membership.is_of(cluster):
            if not core_of(communicator).has_failed:
                return use.membership, communicator
            use.users = 1
            communicator.close()
    return None


def resolve(
    environ: Mapping[str, str],
    *,
    rank: int | None = None,
    world_size: int | None = None,
    rendezvous: str | None = None,
    port: int | str | None = None,
    join: str | Sequence[str] | None = None,
) -> Cluster:
    """Returns the cluster of the explicit arguments, completed from ``environ``.

    Raises:
        ConfigError: Only one of ``rank`` and ``world_size`` is given, they contradict each other,
            or detection fails.
    """
    if rendezvous is not None:
        environ = {**environ, parse.RENDEZVOUS: parse.address(rendezvous, "rendezvous")}
    if port is not None:
        first, last = parse.ports(port, "port")
        environ = {**environ, parse.PORT: f"{first}-{last}"}
    if join is not None:
        # Detection of the cluster only needs to know that `join` is set.
        environ = {**environ, parse.JOIN: "auto"}
    if rank is None and world_size is None:
        return detect(environ)
    if rank is None or world_size is None:
        missing, given = ("rank", "world_size") if rank is None else ("world_size", "rank")
        raise ConfigError(
            f"init() has the argument {given} but not {missing}; give both or neither"
        )
    place = parse.argument_place(rank, world_size)
    address = parse.given_rendezvous(environ)
    if address is None and place.world_size > 1:
        raise ConfigError(
            "init() has rank and world_size but no rendezvous; give the host:port at which rank 0 "
            f"listens, or set {parse.RENDEZVOUS}"
        )
    reason = "rank and world_size are arguments of init()."
    return Cluster.of(place, address, "arguments", reason, job_id=parse.given_job_id(environ))


def _ending_with_the_job(wanted: Settings) -> AbstractContextManager[None]:
    """Returns a context in which a process that waits to join ends with a successful job."""
    if not wanted.join:
        return nullcontext()
    # Only elastic jobs need this module.
    from gradring.group.job_end import ends_with_the_job

    return ends_with_the_job()


def _warn_of_misspelt_variables() -> None:
    """Warns of unknown variables whose names are similar to those of settings."""
    known = {setting.variable for setting in SETTINGS}
    for name in sorted(os.environ.keys() - known):
        setting = meant(name, known, prefix=PREFIX) if name.startswith(PREFIX) else None
        if setting is not None:
            _warn(f"{name} is set, but is no setting{did_you_mean(setting)}")


def _check_guards(cluster: Cluster, settings: Settings) -> None:
    """Warns of a group that anybody on the network could join.

    Raises:
        ConfigError: Ranks of another job could join it by accident.
    """
    if settings.token or cluster.world_size == 1 or _stays_on_loopback(cluster, settings):
        return
    if cluster.job_id is None:
        raise ConfigError(
            f"rank {cluster.rank} would meet the others at {cluster.rendezvous} with neither a "
            "token nor a job id, so two jobs at this address would mix; give all ranks the same "
            f"GRADRING_TOKEN_FILE, or a {parse.JOB_ID} that no other job has",
            rank=cluster.rank,
        )
    if not (settings.tls or settings.require_auth):
        _warn(
            f"rank {cluster.rank} joins {cluster.rendezvous} without a token, so anybody who "
            "reaches its ports can join the job; set GRADRING_TOKEN or GRADRING_TOKEN_FILE"
        )


def _stays_on_loopback(cluster: Cluster, settings: Settings) -> bool:
    """Returns True if rank 0 and this rank listen on the loopback interface only."""
    if settings.interface is not None:  # it replaces the configured host
        return parse.is_loopback(parse.joined_address(settings.interface, 0))
    return all(map(parse.is_loopback, filter(None, (cluster.rendezvous, cluster.listen))))


def _warn(text: str) -> None:
    """Warns with the source line of the program that called this package."""
    frame, level = inspect.currentframe(), 1
    while frame and frame.f_back and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)
