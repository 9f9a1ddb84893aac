"""The policy of a job with parameter servers, whose processes restart independently.

Processes are numbered: first the workers by rank, then the servers. Workers do not depend on each
other, so they continue if one is lost. All workers need every server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle, islice

from gradring.launch.hosts import Host
from gradring.launch.output import say
from gradring.launch.processes import RankProcess
from gradring.launch.slots import pause_s
from gradring.launch.supervisor import Policy, Supervisor


class Servers(Policy):
    """Workers and their servers; the job succeeds if one worker succeeds."""

    def __init__(self, ranks: Sequence[Host], servers: int, restarts: int) -> None:
        """Places the processes; the servers are distributed over the workers' hosts.

        Args:
            ranks: The host of each worker.
            servers: Number of servers.
            restarts: Maximum number of restarts, summed over all processes.
        """
        self.ranks = ranks
        self.servers = list(islice(cycle(dict.fromkeys(ranks)), servers))
        self._restarts_allowed = restarts
        self._restarted = 0
        self._environments: list[dict[str, str]] = []
        self._attempts: dict[int, int] = {}
        self._due: dict[int, float] = {}
        #: Workers without which the others went on.
        self.lost: list[RankProcess] = []
        self._completed = False

    @property
    def pending(self) -> bool:
        """True if a process waits for its restart."""
        return bool(self._due)

    def begin(self, job: Supervisor, environ: Mapping[str, str]) -> None:
        """Starts all workers and servers."""
        super().begin(job, environ)
        self._environments = job.environments(environ)
        for number, environment in enumerate(self._environments):
            job.start(number, environment)

    def act(self, now: float) -> None:
        """Restarts due processes, and ends servers that run on after all workers have ended."""
        for number, at in list(self._due.items()):
            if now >= at and not self._job.processes.ranks[number].group_is_alive:
                del self._due[number]
                attempt = {"GRADRING_RESTART": str(self._attempts[number])}
                self._job.start(number, {**self._environments[number], **attempt})
        watch, grace_s = self._job.watch, self._job.grace_s
        if self._over and self._job.processes.running() and not watch.is_ending:
            watch.end(grace_s, 2 * grace_s)

    def ended(self, ended: Sequence[RankProcess], now: float) -> list[RankProcess]:
        """Returns failures that end the job: a server without a restart left, or all workers."""
        fatal = []
        for process in ended:
            number, is_worker = process.rank, process.rank < len(self.ranks)
            if process.exit_code == 0:
                self._completed |= is_worker
                continue
            how = f"{self.name(number)} on {process.host} failed ({process.ending})"
            if self._restarted < self._restarts_allowed:
                self._restarted += 1
                attempt = self._attempts[number] = self._attempts.get(number, 0) + 1
                self._due[number] = now + pause_s(attempt - 1)
                count = f"restart {self._restarted}/{self._restarts_allowed}"
                say(f"{how}; it is started again ({count}), and the others continue")
            elif is_worker:
                self.lost.append(process)
                if not self._over:
                    say(f"{how}; the others continue without it")
            else:
                fatal.append(process)
        if fatal:
            self._due.clear()
        if fatal or (self._over and not self._completed):
            return self.lost + fatal
        return []

    @property
    def _over(self) -> bool:
        """True if all workers have ended, so that servers have no more clients."""
        running = (process.rank < len(self.ranks) for process in self._job.processes.running())
        return not self._due and not any(running)
