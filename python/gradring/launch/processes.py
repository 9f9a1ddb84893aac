"""Rank processes, each the leader of its own session and process group.

A group is signalled as a whole, so that the children of a rank (data loaders, a shell's command)
end with it. Leaving the ``with`` block of `RankProcesses` kills all remaining processes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import BinaryIO

from gradring.launch import exec_rank
from gradring.launch.guardian import Guardian
from gradring.machine import resources

#: Time limit for a killed process to disappear; after that nobody waits for it.
REAP_S = 5.0

Stream = int | BinaryIO | None
PIPE, DEVNULL = subprocess.PIPE, subprocess.DEVNULL


class GroupLeader:
    """A process and the process group it leads; both end with this process."""

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        guardian: Guardian,
        *,
        stdin: Stream = DEVNULL,
        stdout: Stream = None,
        stderr: Stream = None,
    ) -> None:
        """Starts the command, which dies with this process.

        Args:
            command: Program and arguments.
            environ: All variables of the process.
            guardian: Kills the group if this process is killed.
            stdin: As in ``subprocess.Popen``; default: no input.
            stdout: As in ``subprocess.Popen``.
            stderr: As in ``subprocess.Popen``.
        """
        self._guardian = guardian
        self.popen = subprocess.Popen(
            tied(command),
            env=dict(environ),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        self.group_is_alive = True
        guardian.watch(self.popen.pid)

    @property
    def pid(self) -> int:
        """Process id, which is also the group id."""
        return self.popen.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code; minus the signal's number if one killed it; None while it runs."""
        return self.popen.returncode

    @property
    def ending(self) -> str:
        """Description of the exit code."""
        assert self.exit_code is not None
        return describe_exit(self.exit_code)

    def poll(self) -> int | None:
        """Returns the exit code once the process has ended, and sends its children SIGTERM."""
        if self.popen.returncode is None and self._has_ended():
            # The process is not collected yet, so its number cannot belong to another group.
            self.signal(signal.SIGTERM)
            self.popen.poll()
        if self.popen.returncode is not None and self.group_is_alive and not self._group_exists():
            self.group_is_alive = False
            self._guardian.forget(self.pid)
        return self.popen.returncode

    def signal(self, signum: int) -> None:
        """Sends a signal to every process of the group; does nothing if the group has ended."""
        if self.group_is_alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signum)

    def _has_ended(self) -> bool:
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # somebody else collected it: Popen copes with that
            return True

    def _group_exists(self) -> bool:
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        # In a container whose first process reaps no orphans, zombies keep the group alive.
        return any(resources.group_if_running(other) == self.pid for other in resources.processes())


class RankProcess(GroupLeader):
    """One rank on this machine.

    Attributes:
        is_lost: True if the connection to its host was lost, so that its end is unknown.
    """

    is_lost = False

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        environ: Mapping[str, str],
        guardian: Guardian,
        **streams: Stream,
    ) -> None:
        """Starts the command as `GroupLeader` does; ``rank`` is for messages."""
        super().__init__(command, environ, guardian, **streams)
        self.rank = rank
        self.host = socket.gethostname()


class RankProcesses:
    """The rank processes of one world, in rank order; leaving the context kills the rest."""

    def __init__(self) -> None:
        """Starts without processes; `start` adds the ranks in order."""
        self.ranks: list[RankProcess] = []
        #: Processes that serve the ranks and are ended with them, by their negative numbers.
        self.helpers: dict[int, RankProcess] = {}
        self.guardian = Guardian()

    def start(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        *,
        rank: int | None = None,
        **streams: Stream,
    ) -> RankProcess:
        """Starts the next rank, or ``rank`` again, on this machine; see `RankProcess`."""
        number = len(self.ranks) if rank is None else rank
        return self.add(RankProcess(number, command, environ, self.guardian, **streams))

    def add(self, process: RankProcess) -> RankProcess:
        """Adds a started process, perhaps in place of an ended one with the same number."""
        if process.rank < 0:
            self.helpers[process.rank] = process
        else:
            self.ranks[process.rank : process.rank + 1] = [process]
        return process

    def numbered(self, number: int) -> RankProcess:
        """Returns a rank, or a helper for a negative number."""
        return self.helpers[number] if number < 0 else self.ranks[number]

    def poll(self) -> list[RankProcess]:
        """Collects exit codes; returns the processes that have ended since the last call."""
        running = [process for process in self._all() if process.exit_code is None]
        for process in self._all():
            process.poll()
        return [process for process in running if process.exit_code is not None]

    def running(self) -> list[RankProcess]:
        """Returns the ranks whose process has not ended."""
        return [process for process in self.ranks if process.exit_code is None]

    def alive(self) -> bool:
        """Returns True while any process of any group is alive."""
        return any(process.group_is_alive for process in self._all())

    def signal(self, signum: int) -> None:
        """Sends a signal to the group of every rank."""
        for process in self.ranks:
            process.signal(signum)

    def signal_all(self, signum: int) -> None:
        """Sends a signal to the group of every rank and helper."""
        for process in self._all():
            process.signal(signum)

    def end_helpers(self) -> None:
        """Kills the helpers, which have no data to save."""
        for process in self.helpers.values():
            process.signal(signal.SIGKILL)

    def close(self) -> None:
        """Kills every remaining group and collects all exit codes."""
        self.poll()
        self.signal(signal.SIGKILL)
        self.end_helpers()
        deadline = time.monotonic() + REAP_S
        while self.alive() and time.monotonic() < deadline:
            self.poll()
            time.sleep(0.005)
        self.guardian.close()

    def _all(self) -> list[RankProcess]:
        return [*self.ranks, *self.helpers.values()]

    def __enter__(self) -> RankProcesses:
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes, also on Ctrl-C."""
        self.close()


def tied(command: Sequence[str]) -> list[str]:
    """Returns the command line of a process that ends with this one, even if this is killed."""
    return [sys.executable, "-I", "-S", exec_rank.__file__, str(os.getpid()), *command]


def own_input() -> Stream:
    """Returns standard input for a child process, so that it can ask the user at a terminal.

    Returns no input if standard input is closed, or if this process runs in the background of a
    shell. A child with a session of its own would otherwise steal the user's typing from the shell.
    """
    if sys.stdin is None:
        return DEVNULL
    with contextlib.suppress(OSError, ValueError):
        if sys.stdin.isatty() and os.tcgetpgrp(sys.stdin.fileno()) != os.getpgrp():
            return DEVNULL
    return None


def describe_exit(exit_code: int) -> str:
    """Returns words for an exit code: ``exit code 3`` or ``killed by SIGKILL``."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"


def how_it_ended(exit_code: int) -> str:
    """Returns words with a verb: ``ended with exit code 3`` or ``was killed by SIGKILL``."""
    return f"{'ended with' if exit_code >= 0 else 'was'} {describe_exit(exit_code)}"


def shell_exit_code(exit_code: int) -> int:
    """Returns a shell's exit code: 128 plus the signal's number for a killed process."""
    return exit_code if exit_code >= 0 else 128 - exit_code
