"""World: the host, address and variables of each rank."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from gradring.clusters.own_host import address_towards
from gradring.config.parse import joined_address
from gradring.config.values import Settings
from gradring.launch.collect import collect, new_job
from gradring.launch.guardian import Guardian
from gradring.launch.hosts import Host
from gradring.launch.processes import (
    DEVNULL,
    PIPE,
    RankProcess,
    RankProcesses,
    own_input,
)
from gradring.launch.program import Program
from gradring.launch.ranks import environments_at, rank_environments, with_defaults
from gradring.launch.ssh import RemoteRankProcess, Ssh, forwarded
from gradring.launch.survey import survey


class World:
    """The ranks and their hosts; chooses new ports at each start of all ranks."""

    def __init__(
        self,
        placed: Sequence[Host],
        *,
        ssh: Ssh,
        forward: Sequence[str],
        trace: Path | None = None,
        servers: Sequence[Host] = (),
        helpers: Sequence[Host] = (),
        reader: int | None = None,
    ) -> None:
        """Records the hosts of the ranks.

        Args:
            placed: The host of each rank; `place` adds others.
            ssh: Access to other hosts.
            forward: Further variables for those hosts, as ``NAME`` or ``NAME=VALUE``.
            trace: File for the timeline of all ranks.
            servers: The host of each parameter server; as processes they follow the ranks.
            helpers: The host of the dispatcher and of each worker of tf.data service; their numbers
                are -1, -2, ...
            reader: The rank that reads this process's standard input; the other ranks have no
                input.
        """
        self.reader = reader
        #: Reserves ports of this machine against other jobs.
        self.ports = ExitStack()
        self._placed = [*placed, *servers]
        self._servers = len(servers)
        self._helpers = helpers
        self.ssh = ssh
        self._forward = forward
        self._trace = trace
        self._job = new_job() if trace is not None else None
        self._used = dict.fromkeys(self._placed)

    @property
    def remote(self) -> bool:
        """True if a rank runs on another host."""
        return any(not host.is_local for host in self._placed)

    def place(self, rank: int, host: Host) -> None:
        """Moves a rank to another host, or adds the next one."""
        self._placed[rank : rank + 1] = [host]
        self._used[host] = None

    def title(self, number: int) -> str:
        """Returns a process's name, such as ``rank 1``, ``ps 0`` or ``input worker 0``."""
        if number < 0:
            return "input dispatcher" if number == -1 else f"input worker {-2 - number}"
        ranks = len(self._placed) - self._servers
        return f"ps {number - ranks}" if self._servers and number >= ranks else f"rank {number}"

    def environments(
        self, environ: Mapping[str, str], guardian: Guardian, goes_on: Callable[[], bool]
    ) -> list[dict[str, str]]:
        """Returns the environments of all ranks, then of all servers, with free ports.

        Args:
            environ: The variables to start from.
            guardian: Passed to `survey`.
            goes_on: Passed to `survey`; if that is cancelled, the result is empty.

        Raises:
            OSError: A host cannot be used, or has too few free ports.
        """
        self.ports.close()
        ranks = len(self._placed) - self._servers
        if not self.remote:
            return rank_environments(environ, ranks, servers=self._servers, held=self.ports)
        needed = Counter(self._placed)
        asked = [replace(host, slots=ranks) for host, ranks in needed.items()]
        found = survey(asked, self.ssh, guardian, goes_on, held=self.ports)
        if not found:
            return []
        ports = dict(zip(needed, found.values(), strict=True))
        addresses = [joined_address(self._name(h), ports[h].pop()) for h in self._placed]
        own, others = addresses[:ranks], addresses[ranks:]
        return environments_at(with_token(environ), own, ranks, servers=others)

    def start(
        self, processes: RankProcesses, program: Program, rank: int, environ: Mapping[str, str]
    ) -> RankProcess:
        """Starts the next rank, or one that has ended again; its two streams are pipes."""
        host = self._host(rank)
        # Servers do not count: they compute little, and tf.data shares cores by itself.
        ranks = self._placed[: len(self._placed) - self._servers] if rank >= 0 else []
        local_size = max(1, sum(other.is_same_machine(host) for other in ranks))
        if host.is_local:
            environ = with_defaults(environ, local_size, self._names())
            command = program.command(environ.get("PATH"))
            stdin = own_input() if rank == self.reader else DEVNULL
            streams = {"stdin": stdin, "stdout": PIPE, "stderr": PIPE}
            return processes.start(command, environ, rank=rank, **streams)
        remote = RemoteRankProcess(
            *(rank, host, program, forwarded(environ, self._forward), processes.guardian),
            ssh=self.ssh,
            local_size=local_size,
            hosts=self._names(),
            job=self._job,
        )
        return processes.add(remote)

    def python_of(self, rank: int) -> str:
        """Returns the path of gradring's interpreter on this rank's host."""
        return sys.executable if self._host(rank).is_local else self.ssh.python

    def collect_parts(self) -> list[str]:
        """Copies the timeline's parts from other hosts; returns a sentence for each failure."""
        if self._trace is None or self._job is None:
            return []
        others = {host.target: host for host in self._used if not host.is_local}
        return collect(list(others.values()), self.ssh, self._job, self._trace)

    def _host(self, number: int) -> Host:
        return self._helpers[-1 - number] if number < 0 else self._placed[number]

    def _name(self, host: Host) -> str:
        """Returns the name at which the other hosts reach `host`."""
        if not host.is_local:
            return host.name
        return address_towards(next(h.name for h in self._placed if not h.is_local))

    def _names(self) -> list[str]:
        """Returns the names and addresses at which processes of the job reach each other."""
        hosts = [*self._used, *self._helpers]
        others = [host.name for host in hosts if not host.is_local]
        names = [host.name for host in hosts]
        if others:
            with contextlib.suppress(OSError):  # ssh reports an unreachable host
                names.append(address_towards(others[0]))
        return list(dict.fromkeys(names))


def with_token(environ: Mapping[str, str]) -> dict[str, str]:
    """Replaces the token's file, which other hosts do not have, by the token itself."""
    changed = dict(environ)
    if changed.get("GRADRING_TOKEN_FILE"):
        token = Settings.from_environ(environ).token
        assert token is not None
        changed["GRADRING_TOKEN"] = os.fsdecode(token)
        del changed["GRADRING_TOKEN_FILE"]
    return changed
