"""Supervisor: the loop that starts, watches and ends the processes of a job.

One thread does everything, so that lines are never mixed: it sleeps until a pipe has output, a
child has ended or a signal has arrived. Kinds of jobs differ in their `Policy`.
"""

from __future__ import annotations

import functools
import os
import signal
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gradring.config.words import agreed, counted
from gradring.launch.hosts import Host
from gradring.launch.output import PROMPT_S, Logs, RankOutput, Tracebacks, say
from gradring.launch.processes import RankProcess, RankProcesses
from gradring.launch.program import Program
from gradring.launch.report import Blame, last_words
from gradring.launch.signals import NOTICES, RESUME, SUSPEND, arrived, stop_here
from gradring.launch.ssh import RemoteRankProcess
from gradring.launch.watch import CLOSING_TICK_S, Watch
from gradring.launch.world import World

#: Time for remaining output after the last process of all groups has ended.
DRAIN_S = 1.0


class Policy(ABC):
    """The rules of one kind of job: start of processes, and consequences of their ends.

    Attributes:
        ranks: The host of each rank of the first start.
        servers: The host of each parameter server; as processes they follow the ranks.
        helpers: The host of each process that serves the ranks and is ended after them; their
            numbers are -1, -2, ...
        restarts: Maximum number of restarts of all processes after a failure of the job.
    """

    ranks: Sequence[Host] = ()
    servers: Sequence[Host] = ()
    helpers: Sequence[Host] = ()
    restarts = 0
    _job: Supervisor

    @property
    def is_local(self) -> bool:
        """True if no process can run on another host."""
        return all(host.is_local for host in (*self.ranks, *self.helpers))

    @property
    def pending(self) -> bool:
        """True until all processes are started; until then the job continues without any."""
        return False

    def name(self, number: int) -> str:
        """Returns the name of a process in messages."""
        return self._job.world.title(number)

    def begin(self, job: Supervisor, environ: Mapping[str, str]) -> None:
        """Starts the first processes, or prepares their start.

        Args:
            job: The supervisor, which starts processes and knows the running ones.
            environ: The variables from which the processes' are made.

        Raises:
            OSError: A process cannot be started, or a host cannot be used.
        """
        self._job = job

    def act(self, now: float) -> None:  # noqa: B027 - most have nothing to do
        """Does due work; called repeatedly until the job ends."""

    @abstractmethod
    def ended(self, ended: Sequence[RankProcess], now: float) -> list[RankProcess]:
        """Handles processes that ended by themselves; returns failures that end the job."""

    def outcome(self) -> tuple[int, str | None]:
        """Returns the exit code of a job that no failure has ended, and a sentence about it."""
        return 0, None

    def culprit(self, blames: Mapping[int, Blame | None]) -> tuple[int, str]:
        """Returns the process that failed first, and words for the rank blamed by its error.

        Args:
            blames: The rank blamed by each process's error, by number in the order of the failures.
        """
        # Errors name ranks of a group, which can differ from the numbers of processes.
        return next((each for each, blame in blames.items() if not blame), next(iter(blames))), ""

    def close(self) -> None:  # noqa: B027
        """Ends helpers that the policy itself has started."""


@dataclass(eq=False)
class Supervisor:
    """The processes of one attempt at a job.

    Attributes:
        program: The program of each process.
        world: The host of each process.
        policy: The rules of this kind of job.
        grace_s: Seconds for the other processes after a failure: half to report their own errors,
            half to react to SIGTERM.
        processes: All processes started so far.
        wakeup: Socket at which the numbers of signals arrive.
        failures: Directory of the failure files that processes write.
        logs: Files of the processes' output.
        shown: Numbers of the processes whose output is also shown; None: all.
        outputs: Standard output and standard error of each process, by number.
        tracebacks: The filter of tracebacks.
        failed: The failures that ended the job, in their order.
        stopped_by: The signal to the launcher that ended the job, if any.
        watch: The wait for input, and the deadlines of the processes.
    """

    program: Program
    world: World
    policy: Policy
    grace_s: float
    processes: RankProcesses
    wakeup: socket.socket
    failures: Path
    logs: Logs
    shown: Collection[int] | None = None
    outputs: dict[int, tuple[RankOutput, RankOutput]] = field(default_factory=dict, init=False)
    tracebacks: Tracebacks = field(default_factory=Tracebacks, init=False)
    failed: list[RankProcess] = field(default_factory=list, init=False)
    stopped_by: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Starts no process yet."""
        self.watch = Watch(self.processes)
        self.watch.listen(self.wakeup, self._take_signals)
        self._open: set[RankOutput] = set()
        #: True once the launcher ends all processes: their exit codes are then its own doing.
        self._ends_all = False

    def failure_of(self, number: int) -> Path:
        """Returns the path of this process's failure file."""
        return self.failures / f"rank-{number}.json"

    def environments(self, environ: Mapping[str, str]) -> list[dict[str, str]]:
        """Returns `World.environments`; none if a signal arrives during the survey of hosts."""
        return self.world.environments(environ, self.processes.guardian, self._goes_on)

    def _goes_on(self) -> bool:
        self.watch.wait(CLOSING_TICK_S)
        return self.stopped_by is None

    def start(
        self, number: int, environ: Mapping[str, str], program: Program | None = None
    ) -> None:
        """Starts the next process, or one that has ended again, and copies its output.

        Args:
            number: The process's number.
            environ: The process's variables.
            program: The process's program; None: the program of the ranks.

        Raises:
            OSError: The process cannot be started.
        """
        failure = self.failure_of(number)
        failure.unlink(missing_ok=True)
        title = self.world.title(number)
        log = self.logs.open(title)
        environ = {**environ, "GRADRING_FAILURE_FILE": str(failure)}
        process = self.world.start(self.processes, program or self.program, number, environ)
        is_shown = self.shown is None or number in self.shown
        name = title.removeprefix("rank ")
        copied = functools.partial(RankOutput, number, log=log, name=name, is_shown=is_shown)
        is_relayed = isinstance(process, RemoteRankProcess) or program is not None
        relayed = failure if is_relayed else None
        out, err = process.popen.stdout, process.popen.stderr
        assert out is not None and err is not None
        self.outputs[number] = (
            copied(out, sys.stdout.buffer),
            copied(err, sys.stderr.buffer, failure=relayed, tracebacks=self.tracebacks),
        )
        for output in self.outputs[number]:
            self.watch.listen(output.pipe, functools.partial(self._copy, output))
            self._open.add(output)

    def were_shown_last(self, number: int, words: Sequence[bytes]) -> bool:
        """Returns True if only equal last words of other processes were shown after these."""
        shown_at = max(output.shown_at for output in self.outputs[number])
        later = [pair for pair in self.outputs.values() if any(o.shown_at > shown_at for o in pair)]
        return shown_at > 0 and all(
            last_words(list(err.tail), list(out.tail)) == words for out, err in later
        )

    def run(self) -> None:
        """Runs until every process has ended and the policy starts no more."""
        self._act()
        while (self.processes.alive() or self._pending) and not self.watch.has_given_up:
            asking = self._prompts()
            self.watch.wait(PROMPT_S if asking else None)
            for output in asking:
                output.show_prompt(time.monotonic())
            self._collect()
            self._act()
            self._shut_down()
        self._drain()

    def _prompts(self) -> list[RankOutput]:
        """Returns outputs of the rank with an input that end in a possible question."""
        reader = self.world.reader
        outputs = () if reader is None else self.outputs.get(reader, ())
        return [output for output in outputs if output.has_prompt()]

    @property
    def _pending(self) -> bool:
        return self.policy.pending and not self._ends_all

    def _act(self) -> None:
        if not self._ends_all:
            self.policy.act(time.monotonic())

    def _collect(self) -> None:
        ended = self.processes.poll()
        if ended:
            # Reads their last output before judging them: one read empties a pipe.
            self.watch.wait(0)
        if not ended or self._ends_all:
            return
        # If several have ended, a killed process comes first, as the more likely cause.
        ended.sort(key=lambda process: ((process.exit_code or 0) > 0, process.rank))
        failed = self.policy.ended(ended, time.monotonic())
        is_first = bool(failed) and not self.failed
        self.failed += failed
        if not is_first:
            return
        self.watch.end(self.grace_s / 2, self.grace_s)
        if others := len(self.processes.running()):
            # Not "failed first": another process can still turn out to be the cause.
            say(
                f"{self.policy.name(failed[0].rank)} has ended ({failed[0].ending}); "
                f"{counted(others, 'process')} still running must end within {self.grace_s:g} s"
            )

    def _shut_down(self) -> None:
        if not (self.processes.running() or self._pending):
            self.processes.end_helpers()
            if not self.watch.is_ending:
                # A deadline for children that the processes have left behind.
                self.watch.end(float("inf"), self.grace_s)
        self._ends_all |= self.watch.send_what_is_due()

    def _take_signals(self) -> None:
        signums = arrived(self.wakeup)
        for index, signum in enumerate(signums):
            if signum in NOTICES:
                self.processes.signal(signum)
            elif signum not in (SUSPEND, RESUME):
                self._stop(signum)
            elif signum == SUSPEND and RESUME not in signums[index:]:
                self._suspend()

    def _suspend(self) -> None:
        """Stops all processes and this one, until this one is continued."""
        since = time.monotonic()
        # The processes have sessions of their own, so the terminal's signal does not reach them.
        self.processes.signal_all(signal.SIGSTOP)
        stop_here()
        self.processes.signal_all(signal.SIGCONT)
        self.watch.postpone(time.monotonic() - since)

    def _stop(self, signum: int) -> None:
        """Forwards a signal; processes have the grace time to end, none after a second signal."""
        if self.stopped_by is None and signum != signal.SIGPIPE and self.processes.running():
            say(_told_to_end(signum, len(self.processes.ranks), self.grace_s))
        self.watch.end(float("inf"), self.grace_s if self.stopped_by is None else 0.0)
        self.stopped_by = self.stopped_by or signum
        self._ends_all = self.tracebacks.one = True
        self.processes.signal(signal.SIGTERM if signum == signal.SIGPIPE else signum)

    def _copy(self, output: RankOutput) -> None:
        try:
            if output.copy(time.monotonic()):
                return
        except BrokenPipeError:
            self._discard_output()
            return
        self.watch.ignore(output.pipe)
        self._open.discard(output)
        output.pipe.close()

    def _discard_output(self) -> None:
        """Ends the job quietly when the reader of our output has gone, as in ``... | head``."""
        with open(os.devnull, "wb") as nowhere:
            for stream in (sys.stdout, sys.stderr):
                os.dup2(nowhere.fileno(), stream.fileno())
        self._stop(signal.SIGPIPE)

    def _drain(self) -> None:
        deadline = time.monotonic() + DRAIN_S
        while self._open and time.monotonic() < deadline:
            self.watch.wait(CLOSING_TICK_S)
        # Even after the deadline, nothing written is lost: one read empties a pipe.
        self.watch.wait(0)
        for output in self._open:
            output.finish()
        self.watch.close()


def _told_to_end(signum: int, ranks: int, grace_s: float) -> str:
    """Returns the message on a signal that ends the job: the time left, a second signal."""
    name = signal.Signals(signum).name
    cause, again = ("interrupted", "Ctrl-C") if signum == signal.SIGINT else (name, name)
    who, whom = agreed(ranks, "the rank has", "ranks have"), agreed(ranks, "it", "them")
    return f"{cause}: {who} {grace_s:g} s to end; {again} again ends {whom} now"
