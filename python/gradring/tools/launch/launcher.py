"""``gradring run``: starts the ranks, watches them, and ends them together.

One thread does everything: it sleeps until a pipe has output, a child has ended or a signal has
arrived, so that lines are never mixed. Which rank failed first is decided when all have ended: the
others learn of a failure while the rank to blame may still be ending. In an elastic job, `Elastic`
starts the ranks, and starts them again one by one; the loop is the same.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import selectors
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from gradring.observe import paths, step_log
from gradring.tools.launch import tracing
from gradring.tools.launch.elastic import Elastic
from gradring.tools.launch.exec_rank import CANNOT_START
from gradring.tools.launch.hosts import THIS_HOST, Host, place_ranks
from gradring.tools.launch.output import RankOutput
from gradring.tools.launch.processes import (
    REAP_S,
    RankProcess,
    RankProcesses,
    describe_exit,
    shell_exit_code,
)
from gradring.tools.launch.program import Program
from gradring.tools.launch.report import (
    Blame,
    blame_left,
    first_cause,
    last_words,
    missing_module,
    room_for_failures,
)
from gradring.tools.launch.servers import ServerJob, title
from gradring.tools.launch.signals import arrived, signals_as_bytes
from gradring.tools.launch.slots import Limits, pause_s
from gradring.tools.launch.ssh import RemoteRankProcess, Ssh
from gradring.tools.launch.survey import SurveyError
from gradring.tools.launch.world import World

DEFAULT_GRACE_S = 10.0
TICK_S = 0.5
CLOSING_TICK_S = 0.02
#: How long output may still arrive after the last process of all groups has ended.
DRAIN_S = 1.0


def launch(
    command: Sequence[str],
    world_size: int,
    *,
    environ: Mapping[str, str] = os.environ,
    log_dir: Path | None = None,
    grace_s: float = DEFAULT_GRACE_S,
    hosts: Sequence[Host] = (),
    module: bool = False,
    ssh: Ssh | None = None,
    forward: Sequence[str] = (),
    max_restarts: int = 0,
    trace: Path | None = None,
    elastic: Limits | None = None,
    host_script: Path | None = None,
    servers: int = 0,
) -> int:
    """Runs ``command`` once per rank and returns when all ranks have ended.

    Must be called from the main thread, because it takes over SIGINT, SIGTERM and SIGHUP: they end
    all ranks, and a second one kills them at once.

    Args:
        command: Program and arguments. A Python script, ``*.py``, runs under this interpreter, or
            on other hosts under that of ``ssh``.
        world_size: Number of ranks.
        environ: The variables from which those of the ranks are made.
        log_dir: Directory for ``rank-0.log`` and so on, each rank's lines without prefix; for
            ``steps.jsonl``, what a `gradring.Monitor` on rank 0 measures, on rank 0's host; and,
            without ``GRADRING_FLIGHT_DIR``, for ``flight``, each rank's flight record on its host.
        grace_s: Seconds that the other ranks have when one has failed: half to report their own
            errors, half to react to SIGTERM; then they are killed.
        hosts: Where the ranks run, filled in this order; those with another name than this
            machine's are reached by ssh. Empty: all on this machine.
        module: Whether the command is a Python module and its arguments, as of ``python -m``.
        ssh: How other hosts are reached; default: by ssh without options, and with this
            interpreter's path.
        forward: Variables for those hosts, as ``NAME`` or ``NAME=VALUE``, besides those that
            always travel.
        max_restarts: How often all ranks are started again when one has failed. They find the
            number of the attempt, from 0, in ``GRADRING_RESTART``, and with restarts have
            ``attempt-0`` and so on inside ``GRADRING_FLIGHT_DIR`` for their flight records.
        trace: The file for a timeline of all ranks, on whatever hosts; says when it is written.
        elastic: Ranks that fail start again by themselves, within these limits, while the others
            go on; ``max_restarts`` does not count then. They find in ``GRADRING_JOIN`` where the
            others may be, and in ``GRADRING_RESTART`` how often they have started before.
        host_script: For an elastic job, a program that prints the hosts that there are, as a host
            file has them. It is asked again and again: ranks start on hosts that come, and leave
            those that go. Without ``hosts``, those that it names first are those of the start.
        servers: Number of parameter servers, tasks of type ``ps`` in ``TF_CONFIG``, which run the
            same command beside the ranks, one host after the other. Then no rank ends the others:
            the job is done if one of them ends well, and ``max_restarts`` counts single processes.

    Returns:
        0, or the code of the rank that failed first (128 plus the number of the signal that killed
        it), or 128 plus the number of the signal that ended this launcher. A rank whose error
        blames another failed rank has not failed first, nor one that this launcher ended.

    Raises:
        OSError: There are too few free ports, or ``log_dir`` cannot be written.
        SurveyError: A host cannot be used; it is an `OSError`, too.
    """
    program = Program(command, module)
    hosts = hosts or ([] if host_script else [replace(THIS_HOST, slots=world_size)])
    placed = place_ranks(hosts, world_size) if elastic is None else []
    beside = list(itertools.islice(itertools.cycle(dict.fromkeys(placed)), servers))
    world = World(placed, ssh=ssh or Ssh(), forward=forward, trace=trace, servers=beside)
    elsewhere = host_script is not None or any(not host.is_local for host in placed or hosts)
    problem = None if elsewhere else program.problem(environ.get("PATH"))
    if problem is not None:
        _say(problem)
        return CANNOT_START
    if trace is not None:
        # An earlier run has left them, perhaps one of more ranks.
        shutil.rmtree(paths.parts_of(trace), ignore_errors=True)
        environ = {**environ, "GRADRING_TRACE": str(trace.absolute())}
    if log_dir is not None:
        step_log.forget(log_dir)
        environ = {
            **environ,
            "GRADRING_LOG_DIR": str(log_dir.absolute()),
            "GRADRING_FLIGHT_DIR": environ.get("GRADRING_FLIGHT_DIR")
            or str(paths.flight_of(log_dir.absolute())),
        }
    flight = Path(environ["GRADRING_FLIGHT_DIR"]) if environ.get("GRADRING_FLIGHT_DIR") else None
    if flight is not None:
        paths.forget(flight)
    workers = world_size if servers else None
    job = _Job(program, world, workers, hosts, log_dir, grace_s, elastic, host_script, max_restarts)
    if elastic is not None or servers:
        max_restarts = 0
    with signals_as_bytes() as wakeup:
        for attempt in itertools.count():
            numbered = {**environ, "GRADRING_RESTART": str(attempt)}
            if max_restarts > 0 and flight is not None:
                # What the first attempt has left is of more interest than the next one's.
                numbered["GRADRING_FLIGHT_DIR"] = str(paths.of_attempt(flight, attempt))
            try:
                exit_code, stopped = _attempt(job, numbered, wakeup)
            except SurveyError as error:
                # A host that answered before may come back.
                if attempt == 0:
                    raise
                _say(str(error))
                exit_code, stopped = 1, False
            if exit_code == 0 or stopped or attempt == max_restarts:
                break
            pause = pause_s(attempt)
            _say(f"starts all ranks again in {pause:g} s (restart {attempt + 1}/{max_restarts})")
            signum = _signal_within(pause, wakeup)
            if signum is not None:
                exit_code = 128 + signum
                break
        if trace is not None:
            for sentence in [*world.collect_parts(), tracing.merge(trace)]:
                _say(sentence)
    return exit_code


@dataclass(frozen=True)
class _Job:
    """What is run, and how; see `launch`."""

    program: Program
    world: World
    #: As far as there are servers: processes from this number on.
    workers: int | None
    hosts: Sequence[Host]
    log_dir: Path | None
    grace_s: float
    elastic: Limits | None
    host_script: Path | None
    max_restarts: int


def _attempt(job: _Job, environ: Mapping[str, str], wakeup: socket.socket) -> tuple[int, bool]:
    """Runs the job once; the exit code, and whether a signal to the launcher ended it."""
    world, log_dir = job.world, job.log_dir
    environments = world.environments(environ) if job.elastic is None else []
    with contextlib.ExitStack() as stack:
        anew = environ["GRADRING_RESTART"] == "0"
        logs: dict[int, IO[bytes] | None] = {}
        failures = Path(stack.enter_context(room_for_failures("gradring-run-")))

        def start(rank: int, environment: Mapping[str, str]) -> None:
            failure = launched.failure_of(rank)
            failure.unlink(missing_ok=True)
            if rank not in logs:
                try:
                    logs[rank] = _open_log(stack, log_dir, title(rank, job.workers), anew)
                except OSError as error:
                    if anew and not logs:
                        raise
                    # A job that runs does not end for want of a log.
                    called = title(rank, job.workers)
                    _say(f"{called} has no log: {error.filename}: {error.strerror}")
                    logs[rank] = None
            environment = {**environment, "GRADRING_FAILURE_FILE": str(failure)}
            process = world.start(processes, job.program, rank, environment)
            launched.listen_to(process, logs[rank])

        def advice(first: RankProcess, module: str) -> str | None:
            return job.program.advice_without(module, first.host, world.python_of(first.rank))

        with RankProcesses() as processes, contextlib.ExitStack() as crews:
            launched = _Launch(processes, wakeup, job.grace_s, failures, job.workers)

            def start_again(number: int, attempt: int) -> None:
                start(number, {**environments[number], "GRADRING_RESTART": str(attempt)})

            for rank, environment in enumerate(environments):
                start(rank, environment)
            if job.workers is not None:
                launched.crew = ServerJob(
                    job.workers,
                    job.max_restarts,
                    processes=processes,
                    start=start_again,
                    say=_say,
                )
            if job.elastic is not None:
                launched.crew = Elastic(
                    job.elastic,
                    job.hosts,
                    job.host_script,
                    world=world,
                    environ=environ,
                    processes=processes,
                    grace_s=job.grace_s,
                    now=time.monotonic(),
                    start=start,
                    failure_of=launched.failure_of,
                    say=_say,
                )
                crews.callback(launched.crew.close)
            launched.run()
        exit_code = launched.report(log_dir, environ.get("GRADRING_FLIGHT_DIR"), advice)
    return exit_code, launched.stopped


def _signal_within(seconds: float, wakeup: socket.socket) -> int | None:
    """Waits; the number of a signal that arrives meanwhile ends the wait."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        if select.select([wakeup], [], [], left)[0]:
            for signum in arrived(wakeup):
                return signum
    return None


class _Launch:
    """The state of one run."""

    def __init__(
        self,
        processes: RankProcesses,
        wakeup: socket.socket,
        grace_s: float,
        failures: Path,
        workers: int | None,
    ) -> None:
        self._processes = processes
        self._wakeup = wakeup
        self._grace_s = grace_s
        self._failures = failures
        self._workers = workers
        self._selector = selectors.DefaultSelector()
        self._selector.register(wakeup, selectors.EVENT_READ)
        self._outputs: dict[int, tuple[RankOutput, RankOutput]] = {}
        self._open: set[RankOutput] = set()
        #: What decides about single processes, in an elastic job or one with parameter servers.
        self.crew: Elastic | ServerJob | None = None
        self._failed: list[RankProcess] = []
        self._ends_ranks = False
        self._stopped_by: int | None = None
        self._terminate_at = float("inf")
        self._kill_at = float("inf")
        self._give_up_at = float("inf")

    @property
    def stopped(self) -> bool:
        """Whether a signal to the launcher ended the run."""
        return self._stopped_by is not None

    def failure_of(self, rank: int) -> Path:
        """Where this rank leaves what ended it."""
        return self._failures / f"rank-{rank}.json"

    def listen_to(self, process: RankProcess, log: IO[bytes] | None) -> None:
        """Adds the two streams of a rank that has been started."""
        popen = process.popen
        assert popen.stdout is not None and popen.stderr is not None
        number = process.rank
        called = title(number, self._workers).removeprefix("rank ")
        out = RankOutput(number, popen.stdout, sys.stdout.buffer, log, name=called)
        elsewhere = isinstance(process, RemoteRankProcess)
        failure = self.failure_of(process.rank) if elsewhere else None
        err = RankOutput(number, popen.stderr, sys.stderr.buffer, log, name=called, failure=failure)
        self._outputs[process.rank] = out, err
        for output in (out, err):
            self._selector.register(output.pipe, selectors.EVENT_READ, output)
            self._open.add(output)

    def run(self) -> None:
        """Copies output until every process has ended."""
        self._lead()
        while (self._processes.alive() or self._begins) and time.monotonic() < self._give_up_at:
            self._copy(TICK_S if self._processes.running() else CLOSING_TICK_S)
            self._collect()
            self._lead()
            self._shut_down()
        deadline = time.monotonic() + DRAIN_S
        while self._open and time.monotonic() < deadline:
            self._copy(CLOSING_TICK_S)
        # However late it is here, nothing that was written is lost: a pipe holds one reading.
        self._copy(0)
        for output in self._open:
            output.finish()
        self._selector.close()

    def report(
        self,
        log_dir: Path | None,
        flight_dir: str | None,
        advise: Callable[[RankProcess, str], str | None],
    ) -> int:
        """Repeats the last words of the rank that failed first, below everything else.

        Args:
            log_dir: Where all output is.
            flight_dir: Where flight records may be.
            advise: What to say of that rank when it did not find a module.

        Returns:
            The exit code of the whole.
        """
        if not self._failed:
            if self._stopped_by is not None:
                return 128 + self._stopped_by
            if self.crew is None or self.crew.problem is None:
                self._tell_if_alone()
                return 0
            _say(self.crew.problem)
            return 1
        blames = {
            process.rank: blame_left(
                self.failure_of(process.rank), list(self._outputs[process.rank][1].tail)
            )
            for process in self._failed
        }
        if self.crew is None:
            cause = first_cause({r: b.rank if b else None for r, b in blames.items()})
        else:
            # Errors name ranks of a group, and these are numbers of workers.
            cause = next((each for each, blame in blames.items() if not blame), next(iter(blames)))
        first = self._processes.ranks[cause]
        rank, exit_code = first.rank, first.exit_code
        assert exit_code is not None
        out, err = self._outputs[rank]
        lines = last_words(list(err.tail), list(out.tail))
        log = log_dir / _log_name(title(rank, self._workers)) if log_dir else None
        advice = f"all output: {log}" if log else "--log-dir keeps all output"
        if flight_dir and any(paths.written(Path(flight_dir))):
            advice += f"; what each rank was doing: gradring explain {flight_dir}"
        words = f"its last words ({advice}):" if lines else "it printed nothing"
        how = describe_exit(exit_code)
        elsewhere = self._cause_elsewhere(rank, blames) if self.crew is None else ""
        _say(f"{self._name_of(rank)} on {first.host} failed first ({how}){elsewhere}; {words}")
        with contextlib.suppress(OSError):
            sys.stderr.buffer.write(b"".join(err.prefix + line + b"\n" for line in lines))
            sys.stderr.buffer.flush()
        if (module := missing_module(lines)) and (sentence := advise(first, module)):
            _say(sentence)
        return shell_exit_code(exit_code)

    def _tell_if_alone(self) -> None:
        """Says so where all have ended well, but none was in a group: nobody meant that."""
        ranks = [process.rank for process in self._processes.ranks]
        if self.crew is None and len(ranks) > 1 and not any(map(self._was_in_a_group, ranks)):
            _say(
                f"no rank joined a group, so each of the {len(ranks)} processes ran alone; call "
                "gradring.init(), or make a gradring.tensorflow.CustomCollectiveStrategy, in the "
                "program"
            )

    def _was_in_a_group(self, rank: int) -> bool:
        """By the file that gradring makes then; a full disk may leave it empty."""
        return self.failure_of(rank).exists()

    def _cause_elsewhere(self, rank: int, blames: Mapping[int, Blame | None]) -> str:
        """Names the rank that is to blame, if it did not fail by itself: one that is stopped."""
        blame = blames[rank]
        if blame is None or blame.rank in blames or blame.rank >= len(self._processes.ranks):
            return ""
        process = self._processes.ranks[blame.rank]
        ended = "had ended well" if process.exit_code == 0 else "still ran or was stopped"
        return (
            f", but rank {blame.rank} on {process.host} is to blame ({blame.kind}), which {ended}"
        )

    def _copy(self, timeout_s: float) -> None:
        deadlines = min(self._terminate_at, self._kill_at) - time.monotonic()
        for key, _ in self._selector.select(max(0.0, min(timeout_s, deadlines))):
            if key.fileobj is self._wakeup:
                for signum in arrived(self._wakeup):
                    self._stop(signum)
                continue
            output: RankOutput = key.data
            try:
                more = output.copy(time.monotonic())
            except BrokenPipeError:
                self._discard_output()
                more = True
            if not more:
                self._selector.unregister(output.pipe)
                self._open.discard(output)
                output.pipe.close()

    def _stop(self, signum: int) -> None:
        """Passes the signal on; the ranks have the grace period to end, or none at the second."""
        now = time.monotonic()
        self._kill_at = now + self._grace_s if self._stopped_by is None else now
        self._terminate_at = float("inf")
        self._stopped_by = self._stopped_by or signum
        self._processes.signal(signal.SIGTERM if signum == signal.SIGPIPE else signum)

    def _discard_output(self) -> None:
        """The reader of our output has gone, as in ``gradring run ... | head``: end quietly."""
        with open(os.devnull, "wb") as nowhere:
            for stream in (sys.stdout, sys.stderr):
                os.dup2(nowhere.fileno(), stream.fileno())
        self._stop(signal.SIGPIPE)

    def _name_of(self, number: int) -> str:
        return f"rank {number}" if self.crew is None else self.crew.name(number)

    @property
    def _begins(self) -> bool:
        """Whether an elastic job still looks for hosts for its first ranks."""
        return self.crew is not None and self.crew.begins and not self.stopped

    def _lead(self) -> None:
        """In an elastic job, starts the ranks that are due."""
        if self.crew is not None and not self._ends_ranks and not self.stopped:
            self.crew.act(time.monotonic())

    def _collect(self) -> None:
        ended = self._processes.poll()
        if not ended or self._ends_ranks or self.stopped:
            return
        # Of several found at once, one that was killed is more likely the cause than the effect.
        ended.sort(key=lambda process: ((process.exit_code or 0) > 0, process.rank))
        if self.crew is not None:
            failed = self.crew.ended(ended, time.monotonic())
        else:
            failed = [process for process in ended if process.exit_code != 0]
        if not failed:
            return
        known = bool(self._failed)
        self._failed += failed
        if known:
            return
        now = time.monotonic()
        self._terminate_at = now + self._grace_s / 2
        self._kill_at = now + self._grace_s
        others = len(self._processes.running())
        if others:
            assert failed[0].exit_code is not None
            _say(
                f"{self._name_of(failed[0].rank)} failed ({describe_exit(failed[0].exit_code)}); "
                f"{others} still running must end within {self._grace_s:g} s"
            )

    def _shut_down(self) -> None:
        """Does what is due: SIGTERM, SIGKILL, or a bound for children that ranks left behind."""
        now = time.monotonic()
        ended = not self._processes.running() and not self._begins
        if ended and self._kill_at == float("inf"):
            self._kill_at = now + self._grace_s
        if self.crew is not None and self.crew.over and self._kill_at == float("inf"):
            # Servers that do not notice by themselves that nobody needs them.
            self._terminate_at = now + self._grace_s
            self._kill_at = now + 2 * self._grace_s
        # What a rank says or returns from now on is our doing.
        self._ends_ranks |= now >= min(self._kill_at, self._terminate_at)
        if now >= self._kill_at:
            self._kill_at = now + CLOSING_TICK_S
            self._give_up_at = min(self._give_up_at, now + REAP_S)
            self._processes.signal(signal.SIGKILL)
        elif now >= self._terminate_at:
            self._terminate_at = float("inf")
            self._processes.signal(signal.SIGTERM)


def _open_log(
    stack: contextlib.ExitStack, log_dir: Path | None, called: str, anew: bool
) -> IO[bytes] | None:
    if log_dir is None:
        return None
    log_dir.mkdir(parents=True, exist_ok=True)
    mode = "wb" if anew else "ab"
    return stack.enter_context(open(log_dir / _log_name(called), mode, buffering=0))


def _log_name(called: str) -> str:
    return f"{called.replace(' ', '-')}.log"


def _say(sentence: str) -> None:
    with contextlib.suppress(OSError):  # a full disk must not end the ranks
        print(f"gradring run: {sentence}", file=sys.stderr, flush=True)
