"""Supervisor: the loop that starts, watches and ends the processes of a job.

One thread does everything: it sleeps until a pipe has output, a child has ended or a signal has
arrived, so that lines are never mixed. What jobs differ in is their `Policy`.
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

#: How long output may still arrive after the last process of all groups has ended.
DRAIN_S = 1.0


class Policy(ABC):
    """What jobs differ in: which processes start when, and what follows when one has ended.

    Attributes:
        ranks: The host of each rank that is started first.
        servers: The host of each parameter server; as processes they follow the ranks.
        helpers: The host of each process that serves the ranks, and ends when they have; their
            numbers are -1, -2, ...
        restarts: How often all processes are started again when the job has failed.
    """

    ranks: Sequence[Host] = ()
    servers: Sequence[Host] = ()
    helpers: Sequence[Host] = ()
    restarts = 0
    _job: Supervisor

    @property
    def is_local(self) -> bool:
        """Whether no process can run on another host."""
        return all(host.is_local for host in (*self.ranks, *self.helpers))

    @property
    def pending(self) -> bool:
        """Whether processes are still to be started, so that the job goes on without any."""
        return False

    def name(self, number: int) -> str:
        """The name of a process in messages."""
        return self._job.world.title(number)

    def begin(self, job: Supervisor, environ: Mapping[str, str]) -> None:
        """Starts the first processes, or prepares to.

        Args:
            job: Starts them, and knows those that run.
            environ: The variables from which theirs are made.

        Raises:
            OSError: A process cannot be started, or a host cannot be used.
        """
        self._job = job

    def act(self, now: float) -> None:  # noqa: B027 - most have nothing to do
        """Does what is due; called again and again until the job ends."""

    @abstractmethod
    def ended(self, ended: Sequence[RankProcess], now: float) -> list[RankProcess]:
        """Processes have ended by themselves; returns the failures that end the job, if any."""

    def outcome(self) -> tuple[int, str | None]:
        """The exit code of a job that no failure has ended, and a sentence about it."""
        return 0, None

    def culprit(self, blames: Mapping[int, Blame | None]) -> tuple[int, str]:
        """The process that failed first, and words for whom its error blames.

        Args:
            blames: By number, in the order in which they failed, the rank that an error blames.
        """
        # Errors name ranks of a group, which need not be numbers of processes.
        return next((each for each, blame in blames.items() if not blame), next(iter(blames))), ""

    def close(self) -> None:  # noqa: B027
        """Ends what the policy itself has started."""


@dataclass(eq=False)
class Supervisor:
    """The processes of one attempt at a job.

    Attributes:
        program: What each process runs.
        world: Where each of them runs.
        policy: Which of them start when.
        grace_s: Seconds that the others have when one has failed: half to report their own errors,
            half to react to SIGTERM.
        processes: All that have been started.
        wakeup: Where numbers of signals arrive.
        failures: The directory in which processes leave what ended them.
        logs: Where their output is kept.
        shown: The processes whose output is shown, too; None: all.
        outputs: By number, standard output and standard error of each process.
        tracebacks: Which of them are shown.
        failed: The failures that have ended the job, in their order.
        stopped_by: The signal to the launcher that has ended it.
        watch: What it waits for, and when its processes must end.
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
        """Starts nothing yet."""
        self.watch = Watch(self.processes)
        self.watch.listen(self.wakeup, self._take_signals)
        self._open: set[RankOutput] = set()
        #: Whether what a process prints or returns is the launcher's doing.
        self._ends_all = False

    def failure_of(self, number: int) -> Path:
        """Where this process leaves what ended it."""
        return self.failures / f"rank-{number}.json"

    def environments(self, environ: Mapping[str, str]) -> list[dict[str, str]]:
        """As `World.environments`; there are none if a signal arrives while hosts are asked."""
        return self.world.environments(environ, self.processes.guardian, self._goes_on)

    def _goes_on(self) -> bool:
        self.watch.wait(CLOSING_TICK_S)
        return self.stopped_by is None

    def start(
        self, number: int, environ: Mapping[str, str], program: Program | None = None
    ) -> None:
        """Starts a process, the next or one that has ended, and copies what it prints.

        Args:
            number: Which.
            environ: Its variables.
            program: What it runs; None: what ranks do.

        Raises:
            OSError: It cannot be started.
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
        """Whether nothing was shown after these last words of a process but the same of others."""
        shown_at = max(output.shown_at for output in self.outputs[number])
        later = [pair for pair in self.outputs.values() if any(o.shown_at > shown_at for o in pair)]
        return shown_at > 0 and all(
            last_words(list(err.tail), list(out.tail)) == words for out, err in later
        )

    def run(self) -> None:
        """Returns when every process has ended and the policy starts no more."""
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
        """Outputs of the rank that can ask a user, if there may be a question in them."""
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
            # What they have left arrives before they are judged: a pipe holds one reading.
            self.watch.wait(0)
        if not ended or self._ends_all:
            return
        # Of several found at once, one that was killed is more likely the cause than the effect.
        ended.sort(key=lambda process: ((process.exit_code or 0) > 0, process.rank))
        failed = self.policy.ended(ended, time.monotonic())
        is_first = bool(failed) and not self.failed
        self.failed += failed
        if not is_first:
            return
        self.watch.end(self.grace_s / 2, self.grace_s)
        if others := len(self.processes.running()):
            # Not "failed": it may turn out that another one did so first.
            say(
                f"{self.policy.name(failed[0].rank)} has ended ({failed[0].ending}); "
                f"{counted(others, 'process')} still running must end within {self.grace_s:g} s"
            )

    def _shut_down(self) -> None:
        if not (self.processes.running() or self._pending):
            self.processes.end_helpers()
            if not self.watch.is_ending:
                # A bound for what the processes have started and left behind.
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
        # Sessions of their own ignore what a terminal sends.
        self.processes.signal_all(signal.SIGSTOP)
        stop_here()
        self.processes.signal_all(signal.SIGCONT)
        self.watch.postpone(time.monotonic() - since)

    def _stop(self, signum: int) -> None:
        """Passes the signal on; processes have the grace to end, or none at the second signal."""
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
        """The reader of our output has gone, as in ``gradring run ... | head``: end quietly."""
        with open(os.devnull, "wb") as nowhere:
            for stream in (sys.stdout, sys.stderr):
                os.dup2(nowhere.fileno(), stream.fileno())
        self._stop(signal.SIGPIPE)

    def _drain(self) -> None:
        deadline = time.monotonic() + DRAIN_S
        while self._open and time.monotonic() < deadline:
            self.watch.wait(CLOSING_TICK_S)
        # However late it is here, nothing that was written is lost: a pipe holds one reading.
        self.watch.wait(0)
        for output in self._open:
            output.finish()
        self.watch.close()


def _told_to_end(signum: int, ranks: int, grace_s: float) -> str:
    """What to expect of a signal that ends the job, and of the same one again."""
    name = signal.Signals(signum).name
    cause, again = ("interrupted", "Ctrl-C") if signum == signal.SIGINT else (name, name)
    who, whom = agreed(ranks, "the rank has", "ranks have"), agreed(ranks, "it", "them")
    return f"{cause}: {who} {grace_s:g} s to end; {again} again ends {whom} now"
