"""``run_ranks``: one new interpreter per rank, on this machine.

Interpreters are started, never forked, so that TensorFlow's threads are safe. Each is the leader of
a process group that ends with the call in every case: a failure, a timeout, Ctrl-C or a SIGKILL of
the caller.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

from gradring.launch.output import LineBuffer
from gradring.launch.processes import RankProcess, RankProcesses
from gradring.launch.ranks import rank_environments
from gradring.machine import resources
from gradring.testing.function import FunctionName, load_from_rank
from gradring.testing.network import Host
from gradring.testing.outcome import (
    Outcome,
    RankFailure,
    RankTimeout,
    RemoteError,
    first_failure,
)
from gradring.testing.worker import DUMP_SIGNAL, Call, Report

POLL_S = 0.01
#: Time for the other ranks to report their own errors after a failure.
GRACE_S = 10.0
#: After a timeout: longest wait until ranks begin to print their threads' stacks, and time for
#: printing.
DUMP_BEGIN_S, DUMP_S = 5.0, 0.5
#: Port of the rendezvous on simulated hosts, which have no other listeners.
HOSTS_PORT = 29500
MAX_OUTPUT_BYTES = 1 << 20

_BOOTSTRAP = """\
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from gradring.testing.worker import main
main(sys.argv[2], sys.argv[3])
"""


def run_ranks(
    fn: Callable[..., Any],
    world_size: int = 4,
    *args: Any,
    timeout: float = 120.0,
    env: Mapping[str, str] | None = None,
    check: bool = True,
    hosts: Sequence[Host] = (),
) -> list[Any]:
    """Calls ``fn(*args)`` on every rank of a new world and returns the results in rank order.

    The environment of each rank has its rank, the rendezvous (on 127.0.0.1, or the first of
    ``hosts``) and a token, so that ``gradring.init()`` needs no arguments. Variables of other
    launchers are removed.

    Args:
        fn: A function at the top level of a module, a test file or the running script.
        world_size: Number of ranks.
        args: Arguments for every rank; pickled.
        timeout: Time limit of the call in seconds.
        env: More variables for every rank.
        check: True to raise if a rank fails. False returns failures as values, for tests that kill
            ranks.
        hosts: Simulated hosts (see ``simulated_hosts``) for the ranks, in turn; default: this host.

    Returns:
        The results with ``check=True``, and one `Outcome` per rank with ``check=False``.

    Raises:
        RankFailure: With ``check=True``: a rank raised, exited (even with code 0), or its process
            died. The other ranks had ten seconds to end by themselves.
        RankTimeout: Ranks had not finished in time and were killed; their output has the stacks of
            their threads.
        TypeError: ``fn`` cannot be found by name from another interpreter.
        ValueError: ``world_size`` is below one or ``timeout`` is not above zero.

    Examples:
        >>> import operator, os
        >>> gradring.testing.run_ranks(operator.add, 3, 40, 2)
        [42, 42, 42]
        >>> gradring.testing.run_ranks(os.getenv, 2, "GRADRING_RANK")
        ['0', '1']
        >>> gradring.testing.run_ranks(os.getenv, 2, "RATE", env={"RATE": "0.1"})
        ['0.1', '0.1']
    """
    call = Call.of(FunctionName.of(fn), args)
    return call_on_ranks(call, world_size, timeout, env=env, check=check, hosts=hosts)


def call_on_ranks(
    call: Call,
    world_size: int,
    timeout: float | None,
    *,
    env: Mapping[str, str] | None = None,
    check: bool = True,
    hosts: Sequence[Host] = (),
    on_line: Callable[[int, str], None] | None = None,
) -> list[Any]:
    """Does the work of `run_ranks`, for a call that is already pickled.

    Args:
        call: The call of each rank.
        world_size: As in `run_ranks`.
        timeout: As in `run_ranks`; None: no limit.
        env: As in `run_ranks`.
        check: As in `run_ranks`.
        hosts: As in `run_ranks`.
        on_line: Called with a rank and each line of its output, as soon as it is complete.

    Returns:
        As in `run_ranks`.

    Raises:
        RankFailure: As in `run_ranks`.
        RankTimeout: As in `run_ranks`.
        ValueError: As in `run_ranks`.
    """
    if world_size < 1 or (timeout is not None and not timeout > 0):
        raise ValueError(
            f"world_size={world_size} must be at least 1 and timeout={timeout} above 0"
        )
    with tempfile.TemporaryDirectory(prefix="gradring-ranks-") as directory, ExitStack() as held:
        world = _World(Path(directory), call, world_size, env or {}, hosts, held)
        world.run(
            float("inf") if timeout is None else timeout, stop_at_failure=check, on_line=on_line
        )
        outcomes = world.outcomes()
    if world.unfinished:
        assert timeout is not None
        raise RankTimeout(world.unfinished, outcomes, timeout)
    if not check:
        return outcomes
    culprit = first_failure(outcomes, world.ended_at)
    if culprit is not None:
        raise RankFailure(culprit.rank, outcomes) from culprit.exception
    return [outcome.value for outcome in outcomes]


class _World:
    """The ranks of one call and the directory they write to."""

    def __init__(
        self,
        directory: Path,
        call: Call,
        world_size: int,
        env: Mapping[str, str],
        hosts: Sequence[Host],
        held: ExitStack,
    ) -> None:
        self._directory = directory
        self._call = directory / "call.pickle"
        self._call.write_bytes(pickle.dumps(call))
        self._environments = rank_environments(os.environ, world_size, tf_config=False, held=held)
        self._hosts = hosts
        for environment in self._environments:
            if hosts:
                environment["GRADRING_RENDEZVOUS"] = f"{hosts[0].address}:{HOSTS_PORT}"
            environment.update(env)
        self._processes: list[RankProcess] = []
        self._stopped: set[int] = set()
        self._passes_lines_on = False
        self.ended_at = [float("inf")] * world_size
        self.unfinished: list[int] = []

    def run(
        self,
        timeout: float,
        *,
        stop_at_failure: bool,
        on_line: Callable[[int, str], None] | None = None,
    ) -> None:
        """Starts all ranks, and waits until they have ended or were killed."""
        self._passes_lines_on = on_line is not None
        deadline = time.monotonic() + timeout
        stop_at = float("inf")
        with RankProcesses() as processes:
            self._processes = processes.ranks
            for rank, environment in enumerate(self._environments):
                self._start(processes, rank, environment)
            printed = [_Printed(self._output_path(rank)) for rank in range(len(processes.ranks))]
            while processes.running():
                failed = self._collect(processes)
                now = time.monotonic()
                if failed and stop_at_failure:
                    stop_at = min(stop_at, now + GRACE_S)
                if now >= min(deadline, stop_at):
                    self._stop(processes, out_of_time=stop_at == float("inf"))
                    break
                if on_line is not None:
                    _pass_on(printed, on_line)
                time.sleep(POLL_S)
        if on_line is not None:
            _pass_on(printed, on_line, ended=True)

    def outcomes(self) -> list[Outcome]:
        """Returns the outcome of each rank in rank order; all must have ended."""
        return [self._outcome(process) for process in self._processes]

    def _start(self, processes: RankProcesses, rank: int, environ: Mapping[str, str]) -> None:
        paths = str(self._call), str(self._report_path(rank))
        with open(self._output_path(rank), "wb") as output:
            if self._hosts:
                host = self._hosts[rank % len(self._hosts)]
                command = host.command(*_interpreter(paths))
                processes.start(command, environ, stdout=output, stderr=subprocess.STDOUT)
            else:
                start_interpreter(processes, environ, paths, output)

    def _collect(self, processes: RankProcesses) -> bool:
        """Records the ranks that have ended; returns True if one of them failed."""
        failed = False
        for process in processes.poll():
            report = self._report(process.rank)
            # A rank without a report died between the last poll and this one.
            self.ended_at[process.rank] = report.ended_at if report else time.monotonic() - POLL_S
            failed |= process.exit_code != 0
        return failed

    def _stop(self, processes: RankProcesses, *, out_of_time: bool) -> None:
        """Makes running ranks print their threads' stacks; leaving the world kills them."""
        running = processes.running()
        self._stopped = {process.rank for process in running}
        if out_of_time:
            self.unfinished = sorted(self._stopped)
        # The signal would kill a rank that does not handle it yet.
        asked = [process for process in running if resources.handles(process.pid, DUMP_SIGNAL)]
        before = {process.rank: self._output_size(process.rank) for process in asked}
        for process in asked:
            os.kill(process.pid, DUMP_SIGNAL)
        deadline = time.monotonic() + DUMP_BEGIN_S
        while time.monotonic() < deadline and any(
            self._output_size(rank) == size for rank, size in before.items()
        ):
            time.sleep(POLL_S)
        time.sleep(DUMP_S)

    def _outcome(self, process: RankProcess) -> Outcome:
        rank, report = process.rank, self._report(process.rank)
        exit_code = process.exit_code if process.exit_code is not None else -signal.SIGKILL
        value: Any = None
        exception: BaseException | None = None
        if report is not None and report.value is not None:
            try:
                value = load_from_rank(report.value)
            except Exception as error:
                exception = RemoteError(f"the result of rank {rank} cannot be read: {error!r}")
        elif report is not None:
            exception = _exception(report)
        if report is None and exit_code == 0:
            exception = RemoteError(
                f"rank {rank} ended with exit code 0 before its function returned"
            )
        return Outcome(
            rank,
            value,
            exception,
            exit_code,
            self._output(rank),
            report.traceback if report else "",
            ended_by_harness=rank in self._stopped,
            is_shown=self._passes_lines_on,
        )

    def _report(self, rank: int) -> Report | None:
        try:
            report = pickle.loads(self._report_path(rank).read_bytes())
        except FileNotFoundError:
            return None
        assert isinstance(report, Report)
        return report

    def _output(self, rank: int) -> str:
        with open(self._output_path(rank), "rb") as output:
            size = output.seek(0, os.SEEK_END)
            output.seek(max(0, size - MAX_OUTPUT_BYTES))
            return output.read().decode(errors="replace")

    def _output_size(self, rank: int) -> int:
        return self._output_path(rank).stat().st_size

    def _report_path(self, rank: int) -> Path:
        return self._directory / f"report-{rank}.pickle"

    def _output_path(self, rank: int) -> Path:
        return self._directory / f"output-{rank}.txt"


class _Printed:
    """The output of a rank, with the position up to which it was forwarded."""

    def __init__(self, path: Path) -> None:
        self._path, self._position, self._lines = path, 0, LineBuffer()

    def more(self, *, ended: bool) -> list[str]:
        """Returns the lines since the last call, and an unfinished last line if `ended`."""
        with open(self._path, "rb") as output:
            output.seek(self._position)
            data = output.read()
        self._position += len(data)
        lines = self._lines.feed(data, time.monotonic())
        lines += self._lines.flush() if ended else []
        return [line.decode(errors="replace") for line in lines]


def _pass_on(
    printed: Sequence[_Printed], on_line: Callable[[int, str], None], *, ended: bool = False
) -> None:
    for rank, output in enumerate(printed):
        for line in output.more(ended=ended):
            on_line(rank, line)


def start_interpreter(
    processes: RankProcesses, environ: Mapping[str, str], paths: Sequence[str], output: BinaryIO
) -> None:
    """Starts one more rank, which reads its call from the first path and reports to the second."""
    processes.start(_interpreter(paths), environ, stdout=output, stderr=subprocess.STDOUT)


def search_path() -> list[str]:
    """Returns this process's import path for children; "" becomes the current directory."""
    return [entry or os.getcwd() for entry in sys.path]


def _interpreter(paths: Sequence[str]) -> list[str]:
    return [sys.executable, "-c", _BOOTSTRAP, json.dumps(search_path()), *paths]


def _exception(report: Report) -> BaseException:
    if report.exception is not None:
        try:
            found = load_from_rank(report.exception)
        except Exception:
            found = None
        if isinstance(found, BaseException):
            return found
    return RemoteError(report.traceback)
