"""``gradring doctor [HOST:PORT...]``: checks of the cluster, the network and running jobs."""

from __future__ import annotations

import argparse
import os
import socket
from dataclasses import replace
from typing import TYPE_CHECKING

from gradring.clusters import detect
from gradring.config import parse
from gradring.config.values import Settings
from gradring.config.words import agreed, counted, listed, ranks
from gradring.errors import AuthenticationError, ConfigError, GradringError, RendezvousError
from gradring.machine.streams import print_error
from gradring.tools.cli.arguments import option, say, seconds, usage

if TYPE_CHECKING:
    from gradring.tools.doctor.endpoint import Endpoint
    from gradring.tools.doctor.running import RunningJob

NAME = "doctor"
HELP = "find out what is wrong: with the set-up, with the network, with a running job"
EXAMPLE = "gradring run -np 2 gradring doctor"

TROUBLE = 1
DEFAULT_TIMEOUT_S = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the addresses to check, and the timeout."""
    parser.description = (
        "Started on every rank, by gradring run, srun or mpirun: measures every pair of ranks. "
        "With addresses: whether they can be reached, and, where a gradring job listens, in which "
        "collective each of its ranks is, since when, and for whom it waits. Otherwise: the same "
        "for the jobs of this user on this machine."
    )
    parser.add_argument(
        "addresses",
        nargs="*",
        type=usage(lambda text: parse.address(text, "HOST:PORT")),
        metavar="HOST:PORT",
        help="the rendezvous of a job, or any address; GRADRING_TOKEN or GRADRING_TOKEN_FILE is "
        "the job's token, and GRADRING_TLS_CA, _CERT and _KEY open a job inside TLS; all are found "
        "for jobs on this machine",
    )
    option(parser, "--timeout SECONDS", seconds, default=DEFAULT_TIMEOUT_S)(
        "how long the group may take to form (default %(default)g)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the checks and prints a report; returns 1 if one fails."""
    from gradring.tools.doctor import here, seams

    if arguments.addresses:
        return _look_at(arguments.addresses)
    cluster = detect(os.environ)
    if cluster.world_size > 1:
        return _examine_group(arguments.timeout)
    versions = ", ".join(f"{name} {text}" for name, text in here.versions().items())
    say(f"this process is in no job: {cluster.reason}")
    say(f"versions: {versions}; settings: gradring env")
    for line in seams.lines():
        say(line)
    return _look_at_running_jobs()


def _examine_group(timeout_s: float) -> int:
    from gradring.tools.doctor import endpoint, group

    cluster = detect(os.environ)
    if cluster.rank == 0:
        say(f"{cluster.source}: {cluster.reason}")
    try:
        return 0 if group.examine(cluster, timeout_s, say) else TROUBLE
    except ConfigError:
        raise
    except GradringError as error:
        rank, host = cluster.rank, socket.gethostname()
        print_error(f"rank {rank} on {host} is not in the group: {error}")
        if rank != 0:
            found = endpoint.probe(cluster.rendezvous)
            print_error(f"rank {rank}: {_endpoint_line(found)}")
        return TROUBLE


def _look_at(addresses: list[str]) -> int:
    from gradring.tools.doctor.endpoint import is_same, probe
    from gradring.tools.doctor.running import RunningJob, running_jobs

    own = Settings.from_environ()
    known = running_jobs()
    well = True
    for address in addresses:
        found = probe(address)
        say(_endpoint_line(found))
        here = (job for job in known if is_same(job.rendezvous, address))
        job = next(here, RunningJob(address))
        if found.problem is None:
            job = replace(job, token=own.token or job.token, tls=own.tls or job.tls)
            well &= _report_job(job)
        else:
            well = False
            if job.processes:
                say(_without_rank_0(job, found.problem))
    return 0 if well else TROUBLE


def _look_at_running_jobs() -> int:
    from gradring.tools.doctor.running import running_jobs

    jobs = running_jobs()
    if not jobs:
        say("no gradring job of this user runs on this machine")
        say("to ask a job elsewhere, type, with its rank 0's address: gradring doctor HOST:PORT")
        say(f"to measure the links between ranks, type: {EXAMPLE}")
    well = [_report_job(job) for job in jobs]
    return 0 if all(well) else TROUBLE


def _report_job(running: RunningJob) -> bool:
    from gradring.tools.doctor.job import ask_job

    rendezvous = running.rendezvous
    try:
        job = ask_job(rendezvous, running.token, running.tls)
    except (AuthenticationError, ConfigError) as error:
        say(f"{rendezvous}: a gradring job, which does not answer this command: {error}")
        return False
    except RendezvousError as error:
        say(_unanswered(running, error))
        return False
    except GradringError as error:
        say(
            f"{rendezvous}: something listens there, but it is no gradring rank of this version: "
            f"{error}"
        )
        return False
    say(f"job at {rendezvous}: {counted(job.world_size, 'rank')}")
    for state in job.states.values():
        say(f"  {state}")
    well, sentences = job.verdict()
    for sentence in sentences:
        say(f"{'well' if well else 'problem'}: {sentence}")
    return well


def _unanswered(running: RunningJob, error: RendezvousError) -> str:
    from gradring.tools.doctor.endpoint import probe

    problem = error.problem  # Without the advice, which is for a rank that joins.
    if not running.processes:
        return (
            f"{running.rendezvous}: something listens there, but does not answer as rank 0 of a "
            f"gradring job would: {problem}"
        )
    unreachable = probe(running.rendezvous).problem
    if unreachable is not None:
        return _without_rank_0(running, unreachable)
    return f"{running.rendezvous}: rank 0 of a job should answer here, but: {problem}"


def _without_rank_0(running: RunningJob, problem: str) -> str:
    own = running.processes
    processes = listed(own[rank] for rank in sorted(own))
    return (
        f"{running.rendezvous}: rank 0 {'' if 0 in own else 'has ended, '}does not listen yet, or "
        f"cannot be reached ({problem}); running here: {ranks(list(own))} "
        f"({agreed(len(own), 'process', 'processes')} {processes})"
    )


def _endpoint_line(found: Endpoint) -> str:
    resolved = ", ".join(found.resolved) or "no address"
    if found.problem is not None or found.connect_s is None:
        return f"{found.text} ({resolved}): {found.problem}"
    return f"{found.text} ({resolved}): connected within {found.connect_s * 1e3:.1f} ms"
