"""``gradring run``: attempts at a job, until one succeeds or no restart is left, and the report.

The process that failed first is chosen after all have ended: others can end by a failure before the
process that caused it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import shutil
import socket
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gradring.config.words import counted
from gradring.launch import tracing
from gradring.launch.exec_rank import CANNOT_START
from gradring.launch.output import Logs, say
from gradring.launch.processes import RankProcesses, shell_exit_code
from gradring.launch.program import Program
from gradring.launch.report import blame_left, last_words, missing_module, room_for_failures
from gradring.launch.signals import (
    NOTICES,
    RESUME,
    SUSPEND,
    arrived,
    signals_as_bytes,
    stop_here,
)
from gradring.launch.slots import pause_s
from gradring.launch.ssh import Ssh
from gradring.launch.supervisor import Policy, Supervisor
from gradring.launch.survey import SurveyError
from gradring.launch.world import World
from gradring.machine.streams import write
from gradring.observe import step_log
from gradring.records import paths

DEFAULT_GRACE_S = 10.0


def launch(
    program: Program,
    policy: Policy,
    *,
    environ: Mapping[str, str] = os.environ,
    log_dir: Path | None = None,
    grace_s: float = DEFAULT_GRACE_S,
    ssh: Ssh | None = None,
    forward: Sequence[str] = (),
    trace: Path | None = None,
    reader: int | None = None,
    shown: Collection[int] | None = None,
) -> int:
    """Runs a job and returns when all of its processes have ended.

    Must be called from the main thread, because it handles SIGINT, SIGTERM and SIGHUP: the first
    such signal ends all processes, a second one kills them at once.

    Args:
        program: The program of each process.
        policy: The rules of this kind of job, with the hosts of its processes.
        environ: The variables from which the processes' variables are made. ``GRADRING_RESTART`` is
            added, the number of earlier starts.
        log_dir: Directory for ``rank-0.log`` and so on, each rank's lines without prefix. On rank
            0's host also for ``steps.jsonl``, the measurements of a `gradring.Monitor` on rank 0.
            Without ``GRADRING_FLIGHT_DIR`` also for ``flight``, each rank's flight record on its
            host.
        grace_s: Seconds for the other ranks after a failure: half to report their own errors, half
            to react to SIGTERM. Then they are killed.
        ssh: Access to other hosts; default: ssh without options, and this interpreter's path.
        forward: Further variables for other hosts, as ``NAME`` or ``NAME=VALUE``, besides those
            always forwarded.
        trace: File for a timeline of the ranks of all hosts; a message says when it is written.
        reader: The rank that reads this process's standard input, if it runs on this host; other
            ranks have no input.
        shown: Ranks whose output is shown; None: all.

    Returns:
        0 after success; the exit code of the rank that failed first; or 128 plus the number of the
        signal that ended this launcher. A rank killed by a signal has the code 128 plus the
        signal's number. A rank whose error blames another failed rank did not fail first, nor did a
        rank ended by this launcher.

    Raises:
        OSError: Too few ports are free, or ``log_dir`` cannot be written.
        SurveyError: A host cannot run ranks; the error is also an `OSError`.
    """
    world = World(
        policy.ranks,
        ssh=ssh or Ssh(),
        forward=forward,
        trace=trace,
        servers=policy.servers,
        helpers=policy.helpers,
        reader=reader,
    )
    problem = program.problem(environ.get("PATH")) if policy.is_local else None
    if problem is not None:
        say(problem)
        return CANNOT_START
    job = _Job(program, policy, world, log_dir, grace_s, shown)
    environ = _recording(environ, log_dir, trace)
    with world.ports, signals_as_bytes() as wakeup:
        exit_code = job.run(environ, wakeup)
        if trace is not None:
            unreached = world.collect_parts()
            for sentence in [*unreached, tracing.merge(trace, served=bool(policy.servers))]:
                say(sentence)
    return exit_code


def _recording(
    environ: Mapping[str, str], log_dir: Path | None, trace: Path | None
) -> dict[str, str]:
    """Returns the variables with paths for the ranks' records; removes an earlier run's records."""
    environ = dict(environ)
    if trace is not None:
        # An earlier run can have parts of more ranks.
        shutil.rmtree(paths.parts_of(trace), ignore_errors=True)
        environ["GRADRING_TRACE"] = str(trace.absolute())
    if log_dir is not None:
        step_log.forget(log_dir)
        environ["GRADRING_LOG_DIR"] = str(log_dir.absolute())
        flight = paths.flight_of(log_dir.absolute())
        environ["GRADRING_FLIGHT_DIR"] = environ.get("GRADRING_FLIGHT_DIR") or str(flight)
    if environ.get("GRADRING_FLIGHT_DIR"):
        paths.forget(Path(environ["GRADRING_FLIGHT_DIR"]))
    return environ


@dataclass(frozen=True)
class _Job:
    """The arguments of `launch`."""

    program: Program
    policy: Policy
    world: World
    log_dir: Path | None
    grace_s: float
    shown: Collection[int] | None

    def run(self, environ: Mapping[str, str], wakeup: socket.socket) -> int:
        """Runs the job, with as many restarts as the policy allows; returns its exit code."""
        restarts, flight = self.policy.restarts, environ.get("GRADRING_FLIGHT_DIR")
        for attempt in itertools.count():
            numbered = {**environ, "GRADRING_RESTART": str(attempt)}
            if restarts and flight:
                # Each attempt has its own directory: the first attempt's records matter most.
                numbered["GRADRING_FLIGHT_DIR"] = str(paths.of_attempt(Path(flight), attempt))
            try:
                exit_code, is_stopped = self._attempt(numbered, wakeup, is_first=attempt == 0)
            except SurveyError as error:
                # A host that answered the first survey can come back.
                if attempt == 0:
                    raise
                say(str(error))
                exit_code, is_stopped = 1, False
            if exit_code == 0 or is_stopped or attempt == restarts:
                break
            pause = pause_s(attempt)
            say(f"starts all ranks again in {pause:g} s (restart {attempt + 1}/{restarts})")
            if signum := _signal_within(pause, wakeup):
                exit_code = 128 + signum
                break
        return exit_code

    def _attempt(
        self, environ: Mapping[str, str], wakeup: socket.socket, *, is_first: bool
    ) -> tuple[int, bool]:
        """Runs the job once; returns its exit code, and True if a signal ended the job."""
        with (
            room_for_failures("gradring-run-") as failures,
            Logs(self.log_dir, replace=is_first) as logs,
        ):
            with RankProcesses() as processes, contextlib.closing(self.policy):
                attempt = Supervisor(
                    *(self.program, self.world, self.policy, self.grace_s),
                    *(processes, wakeup, Path(failures), logs),
                    shown=self.shown,
                )
                self.policy.begin(attempt, environ)
                attempt.run()
            if hidden := attempt.tracebacks.hidden.values():
                lines, more = counted(sum(hidden), "line"), counted(len(hidden), "more traceback")
                say(f"not shown: {more}, up to the end ({lines}); {_all_output(self.log_dir)}")
            if attempt.failed:
                return self._report(attempt, logs, environ), attempt.stopped_by is not None
            if attempt.stopped_by is not None:
                return 128 + attempt.stopped_by, True
            exit_code, sentence = self.policy.outcome()
            if sentence is not None:
                say(sentence)
            return exit_code, False

    def _report(self, attempt: Supervisor, logs: Logs, environ: Mapping[str, str]) -> int:
        """Names the process that failed first, with its last words; returns its exit code."""
        blames = {
            process.rank: blame_left(
                attempt.failure_of(process.rank), list(attempt.outputs[process.rank][1].tail)
            )
            for process in attempt.failed
        }
        number, elsewhere = self.policy.culprit(blames)
        first = attempt.processes.numbered(number)
        out, err = attempt.outputs[number]
        lines = last_words(list(err.tail), list(out.tail))
        are_above = attempt.were_shown_last(number, lines)
        advice = _all_output(logs.path(self.world.title(number)))
        flight = environ.get("GRADRING_FLIGHT_DIR")
        if flight and any(paths.written(Path(flight))):
            advice += f"; what each rank was doing: gradring explain {flight}"
        words = "its last words are above" if are_above else "its last words"
        words = f"{words} ({advice})" if lines else "it printed nothing"
        name = self.policy.name(number)
        say(
            f"{name} on {first.host} failed first ({first.ending}){elsewhere}; {words}"
            + ":" * (bool(lines) and not are_above)
        )
        with contextlib.suppress(OSError):
            shown = [] if are_above else lines
            write(sys.stderr.buffer, b"".join(err.prefix + line + b"\n" for line in shown))
        if module := missing_module(lines):
            python = self.world.python_of(number)
            if sentence := self.program.advice_without(module, first.host, python):
                say(sentence)
        if lines[-1:] == [b"bdb.BdbQuit"]:
            say(f"to answer breakpoint(), give a rank the terminal, as with --stdin {number}")
        assert first.exit_code is not None
        return shell_exit_code(first.exit_code)


def _all_output(place: Path | None) -> str:
    return f"all output: {place}" if place else "--log-dir keeps all output"


def _signal_within(seconds: float, wakeup: socket.socket) -> int | None:
    """Waits for `seconds`; returns the number of a signal that ends the wait, or None."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        if select.select([wakeup], [], [], left)[0]:
            for signum in arrived(wakeup):
                if signum == SUSPEND:
                    stop_here()
                elif signum not in (*NOTICES, RESUME):  # no rank runs that could receive these
                    return signum
    return None
