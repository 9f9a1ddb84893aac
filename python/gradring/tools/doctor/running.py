"""The jobs of this user on this machine, found among its processes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gradring.clusters import detect
from gradring.config.values import TLS_VARIABLES, Settings, TlsFiles
from gradring.errors import ConfigError
from gradring.machine import resources

NATIVE_MODULE = b"gradring/_native"
_FILES = ("GRADRING_TOKEN_FILE", *TLS_VARIABLES)


@dataclass(frozen=True)
class RunningJob:
    """A job with a process on this machine.

    Attributes:
        rendezvous: ``host:port`` at which its rank 0 listens.
        token: The job's secret, or None.
        tls: The job's certificates, or None.
        processes: Process id of each rank on this machine; of several processes, the first.
    """

    rendezvous: str
    token: bytes | None = field(default=None, repr=False)
    tls: TlsFiles | None = None
    processes: dict[int, int] = field(default_factory=dict)


def running_jobs() -> list[RunningJob]:
    """Returns the jobs with more than one rank, in no particular order.

    A process counts as a rank if it has loaded gradring and its initial environment describes a
    cluster. The kernel shows the environment to the same user only.
    """
    jobs: dict[str, RunningJob] = {}
    for process_id, environ in _environments():
        try:
            cluster = detect(environ)
            settings = Settings.from_environ(environ)
        except ConfigError:
            continue
        if cluster.world_size > 1:
            job = RunningJob(cluster.rendezvous, settings.token, settings.tls)
            job = jobs.setdefault(cluster.rendezvous, job)
            job.processes.setdefault(cluster.rank, process_id)
    return list(jobs.values())


def _environments() -> Iterator[tuple[int, Mapping[str, str]]]:
    for process in sorted({*resources.processes()} - {os.getpid(), os.getppid()}):
        directory = Path("/proc", str(process))
        try:
            if NATIVE_MODULE not in (directory / "maps").read_bytes():
                continue
            entries = (directory / "environ").read_bytes().split(b"\0")
            place = (directory / "cwd").readlink()
        except OSError:  # the process has ended, or belongs to another user
            continue
        pairs = (os.fsdecode(entry).partition("=") for entry in entries if entry)
        environ = {name: text for name, _, text in pairs}
        for name in _FILES:
            if environ.get(name, "").strip():  # relative to that process's directory
                environ[name] = str(place / environ[name].strip())
        yield process, environ
