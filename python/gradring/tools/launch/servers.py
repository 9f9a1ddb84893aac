"""A job with parameter servers: who goes on when a worker or a server has ended.

Processes are numbered: the workers by their rank, and then the servers. No worker needs another
one, so a lost one is told and missed by nobody; a server is needed by all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gradring.tools.launch.processes import RankProcess, RankProcesses, describe_exit
from gradring.tools.launch.slots import pause_s


class ServerJob:
    """The workers and servers of one job, of which each may start again by itself."""

    def __init__(
        self,
        workers: int,
        restarts: int,
        *,
        processes: RankProcesses,
        start: Callable[[int, int], None],
        say: Callable[[str], None],
    ) -> None:
        """Nobody has ended yet.

        Args:
            workers: How many there are; what follows them are servers.
            restarts: How often processes start again, all together.
            processes: Those that run.
            start: Starts the process of a number; is told how often it has ended before.
            say: Tells the user.
        """
        self._workers = workers
        self._restarts = restarts
        self._processes = processes
        self._start = start
        self._say = say
        self._restarted = 0
        self._attempts: dict[int, int] = {}
        self._due: dict[int, float] = {}
        self._lost: list[RankProcess] = []
        self._completed = False

    @property
    def begins(self) -> bool:
        """Whether a process is to be started again."""
        return bool(self._due)

    @property
    def problem(self) -> None:
        """Nothing: where no process has failed, the job is done."""
        return None

    @property
    def over(self) -> bool:
        """Whether all workers have ended, so that servers have nothing to do."""
        running = (process.rank < self._workers for process in self._processes.running())
        return not self._due and not any(running)

    def name(self, number: int) -> str:
        """What a process is called."""
        return title(number, self._workers)

    def act(self, now: float) -> None:
        """Starts again those that are due."""
        for number, at in list(self._due.items()):
            if now >= at and not self._processes.ranks[number].group_is_alive:
                del self._due[number]
                self._start(number, self._attempts[number])

    def ended(self, ended: Sequence[RankProcess], now: float) -> list[RankProcess]:
        """Processes have ended; returns the failures that end the job, if it ends."""
        fatal = []
        for process in ended:
            number, is_worker = process.rank, process.rank < self._workers
            if process.exit_code == 0:
                self._completed |= is_worker
                continue
            assert process.exit_code is not None
            how = (
                f"{self.name(number)} on {process.host} failed ({describe_exit(process.exit_code)})"
            )
            if self._restarted < self._restarts:
                self._restarted += 1
                attempt = self._attempts[number] = self._attempts.get(number, 0) + 1
                self._due[number] = now + pause_s(attempt - 1)
                count = f"restart {self._restarted}/{self._restarts}"
                self._say(f"{how}; it is started again ({count}), and the others go on")
            elif is_worker:
                self._lost.append(process)
                if not self.over:
                    self._say(f"{how}; the others go on without it")
            else:
                fatal.append(process)
        if fatal:
            self._due.clear()
        if fatal or (self.over and not self._completed):
            return self._lost + fatal
        return []


def title(number: int, workers: int | None) -> str:
    """What a process is called, by its number and by how many workers come before the servers."""
    if workers is None or number < workers:
        return f"rank {number}"
    return f"ps {number - workers}"
