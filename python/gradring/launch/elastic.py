"""The policy of an elastic job, whose workers end and start independently.

`slots` makes the decisions; this module executes them and reports events back. Nothing here waits:
questions to hosts and to the discovery script run in processes of their own.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from signal import SIGKILL, SIGTERM

from gradring.config.parse import JOB_HAS_ENDED, JOIN, PORT, joined_address, ports, value
from gradring.config.values import AUTO
from gradring.config.words import listed
from gradring.errors import ConfigError
from gradring.launch.hostfile import hosts_in
from gradring.launch.hosts import Host, name_of_this_machine
from gradring.launch.output import say
from gradring.launch.processes import RankProcess, how_it_ended
from gradring.launch.question import Question
from gradring.launch.ranks import environments_at, joining
from gradring.launch.report import has_joined, kind_left
from gradring.launch.slots import FIRST_PAUSE_S, LEFT, Limits, Slots, Start
from gradring.launch.supervisor import Policy, Supervisor
from gradring.launch.survey import ANY_ADDRESS, LIMIT_S, command, ports_in, problem
from gradring.launch.world import with_token
from gradring.machine.ports import free_ports

#: Interval and time limit of the discovery script, which prints the available hosts.
DISCOVERY_S, DISCOVERY_LIMIT_S = 1.0, 10.0
#: Interval of the signal `JOB_HAS_ENDED` to processes that have perhaps not joined.
ANNOUNCE_S = 0.5
#: Error class of a process that found no group to join.
APART = "RendezvousError"


class Elastic(Policy):
    """The workers of one elastic job."""

    def __init__(self, limits: Limits, hosts: Sequence[Host], script: Path | None) -> None:
        """Places no worker yet.

        Args:
            limits: The user's limits.
            hosts: Hosts known from the start.
            script: Program that prints the available hosts; None if `hosts` never change.
        """
        self._limits = limits
        self._hosts = hosts
        self._script = script
        self._script_asked: Question | None = None
        self._script_failed = False
        self._hosts_asked: dict[str, tuple[Host, Question]] = {}
        self._founders: dict[int, dict[str, str]] = {}
        self._joining: set[int] = set()
        self._addresses: dict[int, str] = {}
        self._own_name: str | None = None
        self._kill_at: dict[RankProcess, float] = {}
        self._announce_at = self._ask_script_at = float("-inf")
        #: After success: deadline of workers that have not joined, and workers stopped by it.
        self._end_at: float | None = None
        self._late: set[RankProcess] = set()
        self._failed: list[RankProcess] = []
        #: Workers that ended with success, and workers lost after the first success.
        self._well: set[int] = set()
        self._lost: list[RankProcess] = []

    @property
    def is_local(self) -> bool:
        """True if all hosts are known and are this machine."""
        return self._script is None and all(host.is_local for host in self._hosts)

    def begin(self, job: Supervisor, environ: Mapping[str, str]) -> None:
        """Prepares the survey of the hosts; `act` starts the workers.

        Raises:
            ConfigError: ``GRADRING_PORT`` has too few ports for the workers of a host.
        """
        super().begin(job, environ)
        self._environ = dict(environ) if self.is_local else with_token(environ)
        self._given_ports = _given_ports(environ)
        for host in self._hosts:
            if self._fitting(host) != host:
                raise ConfigError(
                    f"{PORT}={environ[PORT]} has fewer ports than {host.name} has ranks "
                    f"({host.slots}); give more, or unset it"
                )
        discovers = self._script is not None
        self._slots = Slots(self._limits, self._hosts, time.monotonic(), discovers=discovers)

    @property
    def pending(self) -> bool:
        """True until the first workers are started."""
        return not (self._slots.founded or self._slots.over)

    def name(self, number: int) -> str:
        """Returns a process's name in messages, which is no rank: ranks change with the group."""
        return f"worker {number}"

    def act(self, now: float) -> None:
        """Polls the questions to hosts and script, and sends due signals and starts due workers.

        Raises:
            OSError: A rank cannot be started.
        """
        self._discover(now)
        self._survey(now)
        for process, at in list(self._kill_at.items()):
            if not process.group_is_alive:
                del self._kill_at[process]
            elif now >= at:
                process.signal(SIGKILL)
        self._announce_the_end(now)
        self._start(now)

    def ended(self, ended: Sequence[RankProcess], now: float) -> list[RankProcess]:
        """Records ended ranks; returns the failures that end the job, if it ends."""
        leaving = self._slots.leaving
        exits = {process.rank: process.exit_code or 0 for process in ended}
        without_group = {
            rank
            for rank, code in exits.items()
            if code and rank in self._joining and kind_left(self._job.failure_of(rank)) == APART
        }
        words = self._slots.ended(exits, now, without_group=without_group)
        for process in ended:
            # Its children got SIGTERM; they are killed before the next process starts.
            self._kill_at[process] = now + FIRST_PAUSE_S
            if process.rank in words:
                left = process.rank in leaving or exits[process.rank] in LEFT
                verb = "has left" if left else "is lost" if process.is_lost else "failed"
                say(
                    f"worker {process.rank} on {process.host} {verb} ({process.ending}); "
                    f"{words[process.rank]}"
                )
        failed = [p for p in ended if p.exit_code != 0 and p.rank not in leaving]
        self._well |= {rank for rank, code in exits.items() if code == 0 and rank not in leaving}
        if self._slots.completed:
            # A worker that came too late to take part is no failure.
            failed = [p for p in failed if p.rank not in without_group and p not in self._late]
            self._lost += [p for p in failed if _is_loss(p)]
            enough = not self._slots.over or len(self._well) >= self._limits.least
            return [p for p in failed if not _is_loss(p)] + ([] if enough else self._lost)
        self._failed += failed
        return self._failed if self._slots.over else []

    def outcome(self) -> tuple[int, str | None]:
        """Returns success once a worker has ended with success, else the reason of the failure."""
        if self._slots.completed:
            lost = [f"worker {p.rank} on {p.host} ({p.ending})" for p in self._lost]
            return 0, f"the job has ended well without {listed(lost)}" if lost else None
        return 1, self._slots.problem or "all workers have left, and none is started again"

    def close(self) -> None:
        """Ends questions that have no answer yet."""
        for _, question in self._hosts_asked.values():
            question.close()
        if self._script_asked is not None:
            self._script_asked.close()

    def _discover(self, now: float) -> None:
        if self._script is None or self._slots.completed:
            return
        try:
            if self._script_asked is None:
                if now >= self._ask_script_at:
                    self._script_asked = self._ask([str(self._script)], now, DISCOVERY_LIMIT_S)
                return
            printed = self._script_asked.answer(now)
            if printed is None:
                return
            hosts = hosts_in(printed.splitlines(), f"what {self._script} prints")
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            if isinstance(error, OSError) and self.pending:
                raise  # the program does not exist
            if not self._script_failed:
                say(f"{_why(error)}; the hosts that were known last count")
            self._script_failed = True
        else:
            self._script_failed = False
            for rank in self._slots.offer([self._fitting(host) for host in hosts], now):
                why = f"{self._script} does not name its host any more, or with fewer workers"
                self._let_go(self._job.processes.ranks[rank], self._job.grace_s, why, now)
        self._script_asked = None
        self._ask_script_at = now + DISCOVERY_S

    def _let_go(self, process: RankProcess, grace_s: float, why: str, now: float) -> None:
        say(f"worker {process.rank} on {process.host} must leave within {grace_s:g} s: {why}")
        process.signal(SIGTERM)
        self._kill_at[process] = now + grace_s

    def _announce_the_end(self, now: float) -> None:
        """After success, ends workers that have not joined yet and would wait in vain.

        A worker that still imports its modules ignores `JOB_HAS_ENDED`, so SIGTERM follows later.
        """
        if not self._slots.completed or now < self._announce_at:
            return
        self._announce_at = now + ANNOUNCE_S
        self._end_at = self._end_at or now + self._job.grace_s / 2
        for process in self._job.processes.running():
            if process.rank not in self._joining:
                continue
            process.signal(JOB_HAS_ENDED)
            may_go_on = process in self._late or now < self._end_at
            if not may_go_on and not has_joined(self._job.failure_of(process.rank)):
                self._late.add(process)
                why = "the job has ended well before it has joined"
                self._let_go(process, self._job.grace_s / 2, why, now)

    def _survey(self, now: float) -> None:
        for host in self._slots.to_ask(now):
            try:
                if host.is_local:
                    held = self._job.world.ports
                    self._answered(host, free_ports(host.slots, ANY_ADDRESS, held=held))
                else:
                    question = self._ask(command(host, self._job.world.ssh), now, LIMIT_S)
                    self._hosts_asked[host.name] = (host, question)
            except OSError as error:
                self._unanswered(host, error, now)
        for name, (host, question) in list(self._hosts_asked.items()):
            try:
                printed = question.answer(now)
                if printed is None:
                    continue
                self._answered(host, ports_in(printed, host))
            except (OSError, subprocess.SubprocessError, ValueError) as error:
                self._unanswered(host, error, now)
            del self._hosts_asked[name]

    def _unanswered(self, host: Host, error: Exception, now: float) -> None:
        follows = self._slots.unanswered(host, now)
        say(f"{problem(error, host, self._job.world.ssh)}; {follows}")

    def _ask(self, words: Sequence[str], now: float, limit_s: float) -> Question:
        guardian = self._job.processes.guardian
        return Question(words, self._environ, guardian, now=now, limit_s=limit_s)

    def _answered(self, host: Host, found: Sequence[int]) -> None:
        self._slots.answered(host, self._given_ports or found)

    def _start(self, now: float) -> None:
        found = self._founded if self.pending else self._joined
        busy = {process.rank for process in self._job.processes.ranks if process.group_is_alive}
        starts = self._slots.to_start(now, busy)
        if not starts:
            return
        self._failed.clear()  # the job continues
        for start, environment in zip(starts, found(starts), strict=True):
            own = {PORT: str(start.port), "GRADRING_RESTART": str(start.attempt)}
            self._job.start(start.slot, {**environment, **own})

    def _founded(self, starts: Sequence[Start]) -> list[dict[str, str]]:
        """Returns the environments of the workers that form the first group."""
        hosts = [start.host for start in starts]
        self._own_name = name_of_this_machine(hosts, self._environ, alone=self._script is None)
        for start in starts:
            self._place(start)
        addresses = [self._addresses[start.slot] for start in starts]
        environments = environments_at(self._environ, addresses, len(starts))
        self._founders = dict(zip(self._addresses, environments, strict=True))
        return environments

    def _joined(self, starts: Sequence[Start]) -> list[dict[str, str]]:
        """Returns the environments of workers that join the existing group."""
        moved = [start for start in starts if self._place(start)]
        for start in moved:
            say(f"worker {start.slot} is started on {start.host.name}, to join the others")
        self._joining |= {start.slot for start in starts}
        return [self._environment_of(start, start in moved) for start in starts]

    def _place(self, start: Start) -> bool:
        """Records a worker's address; returns True if it is new or has changed."""
        name = self._own_name if start.host.is_local else start.host.name
        assert name is not None
        address = joined_address(name, start.port)
        if self._addresses.get(start.slot) == address:
            return False
        self._job.world.place(start.slot, start.host)
        self._addresses[start.slot] = address
        return True

    def _environment_of(self, start: Start, moved: bool) -> dict[str, str]:
        others = [address for slot, address in self._addresses.items() if slot != start.slot]
        founder = self._founders.get(start.slot)
        if founder is not None and not moved:
            # Perhaps the first group has not formed yet, so the worker can found it or join it.
            return {**founder, JOIN: ",".join([AUTO, *others])}
        return joining(next(iter(self._founders.values())), others)

    def _fitting(self, host: Host) -> Host:
        """Returns the host, with at most as many slots as the user gives ports."""
        ranks = len(self._given_ports)
        return replace(host, slots=min(host.slots, ranks)) if ranks else host


def _is_loss(process: RankProcess) -> bool:
    """Returns True if a host or a signal ended a worker, and not its program."""
    return process.is_lost or process.exit_code in (-SIGKILL, 128 + SIGKILL, *LEFT)


def _given_ports(environ: Mapping[str, str]) -> list[int]:
    text = value(environ, PORT)
    if text is None:
        return []
    low, high = ports(text, PORT)
    return list(range(low, high + 1))


def _why(error: Exception) -> str:
    """Describes a failure of the discovery script."""
    if isinstance(error, subprocess.TimeoutExpired):
        return f"{error.cmd[0]} has not ended within {error.timeout:g} s"
    if isinstance(error, subprocess.CalledProcessError):
        said = error.stderr.strip().splitlines()[-1:] or ["nothing"]
        return f"{error.cmd[0]} {how_it_ended(error.returncode)} and said: {said[0]}"
    return str(error)
