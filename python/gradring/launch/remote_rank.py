"""The far end of ``ssh``: starts one rank on this host, by a request on standard input.

The first line is the request, written by ``ssh.RemoteRankProcess``. Each further line is the number
of a signal for the rank. The end of the input means that the launcher is gone, and the rank is
killed. This process forwards the rank's output and exit code as its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gradring.clusters import without_cluster_variables
from gradring.config.parse import JOIN
from gradring.errors import ConfigError
from gradring.launch.collect import make_room
from gradring.launch.exec_rank import CANNOT_START
from gradring.launch.launcher import DEFAULT_GRACE_S
from gradring.launch.output import FAILURE_MARK
from gradring.launch.processes import RankProcesses, shell_exit_code
from gradring.launch.program import Program
from gradring.launch.ranks import with_defaults
from gradring.launch.report import leave_exit_code, left_in, room_for_failures
from gradring.launch.signals import arrived, signals_as_bytes
from gradring.launch.ssh import SSH_FAILED
from gradring.launch.watch import Watch
from gradring.machine.streams import print_error, write

STDIN = 0
READ_BYTES = 1 << 16


class _Lines:
    """Lines of standard input, read without blocking for more than is available."""

    def __init__(self) -> None:
        self._pending = b""
        self.ended = False

    def read(self) -> Iterator[bytes]:
        """Waits for input once, and yields the complete lines."""
        data = os.read(STDIN, READ_BYTES)
        self.ended = not data
        *complete, self._pending = (self._pending + data).split(b"\n")
        yield from complete


def main() -> int:
    """Runs the rank; returns its exit code in a shell's form."""
    lines = _Lines()
    first: list[bytes] = []
    while not first and not lines.ended:
        first = list(lines.read())
    if not first:
        return 128 + signal.SIGHUP
    order: dict[str, Any] = json.loads(first[0])
    try:
        os.chdir(order["directory"])
    except OSError as error:
        host = socket.gethostname()
        print_error(f"no directory {order['directory']!r} on {host}: {error.strerror}")
        return CANNOT_START
    try:
        room = room_for_failures("gradring-rank-")
    except ConfigError as error:
        print_error(f"{socket.gethostname()}: {error}")
        return CANNOT_START
    inherited = without_cluster_variables(os.environ)
    inherited.pop("GRADRING_TOKEN_FILE", None)
    # A login shell activates no virtual environment: makes `python` mean this interpreter.
    beside = os.path.dirname(sys.executable)
    inherited["PATH"] = os.pathsep.join([beside, inherited.get("PATH", os.defpath)])
    all_variables = {**inherited, **order["environ"]}
    environ = with_defaults(all_variables, order["local_size"], order["hosts"])
    if order["job"] is not None:
        environ["GRADRING_TRACE"] = str(make_room(order["job"]))
    program = Program(order["words"], order["module"])
    if (problem := program.problem(environ["PATH"])) is not None:
        print_error(f"{socket.gethostname()}: {problem}")
        return CANNOT_START
    with room as directory, signals_as_bytes() as wakeup, RankProcesses() as processes:
        failure = Path(directory) / "failure.json"
        environ["GRADRING_FAILURE_FILE"] = str(failure)
        rank = processes.start(program.command(environ["PATH"]), environ)
        for line in first[1:]:
            processes.signal(int(line))
        _watch(processes, lines, wakeup, failure if JOIN in environ else None)
        assert rank.exit_code is not None
        exit_code = shell_exit_code(rank.exit_code)
        if exit_code == SSH_FAILED:
            leave_exit_code(failure, exit_code)
        _relay(failure)
        return exit_code


def _relay(failure: Path, before: bytes = b"") -> bytes:
    """Sends the rank's failure file to the launcher if its content has changed."""
    with contextlib.suppress(OSError):  # there is no file, or the launcher is gone
        left = left_in(failure).replace(b"\n", b" ")
        if left != before:
            write(sys.stderr.buffer, FAILURE_MARK + left + b"\n")
        return left
    return before


def _watch(
    processes: RankProcesses, lines: _Lines, wakeup: socket.socket, failure: Path | None
) -> None:
    """Forwards signals until no process of the rank is left, and relays its failure file."""
    watch = Watch(processes)

    def follow_orders() -> None:
        for line in lines.read():
            processes.signal(int(line))
        if lines.ended:
            watch.ignore(STDIN)
            watch.end(float("inf"), 0.0)

    def pass_signals_on() -> None:
        for signum in arrived(wakeup):
            processes.signal(signum)

    watch.listen(STDIN, follow_orders)
    watch.listen(wakeup, pass_signals_on)
    left = b""
    while processes.alive():
        watch.wait()
        processes.poll()
        if failure is not None:
            left = _relay(failure, left)
        if not (processes.running() or watch.is_ending):
            watch.end(float("inf"), DEFAULT_GRACE_S)
        watch.send_what_is_due()


if __name__ == "__main__":
    sys.exit(main())
