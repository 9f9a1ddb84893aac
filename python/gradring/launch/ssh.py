"""A rank on another host: an ssh client here, and ``remote_rank`` at the other end.

The order for the rank (command, variables, token) goes to the other end's standard input, which no
list of processes shows, and so do signals. When that input ends, for whatever reason, the other end
kills its rank: nothing is left behind when this machine dies.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradring.launch.guardian import Guardian
from gradring.launch.hosts import Host
from gradring.launch.processes import PIPE, RankProcess
from gradring.launch.program import Program
from gradring.launch.report import exit_code_left

OPTIONS = (
    *("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15"),
    *("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=3"),
)
#: Variables of this kind travel to other hosts unasked.
FORWARDED_PREFIXES = ("GRADRING_", "TF_", "KERAS_", "OMP_", "PYTHON", "MALLOC_", "GLIBC_")
#: How long the other end has to kill its rank before the ssh client itself is killed.
CLOSING_S = 2.0
#: Exit code of an ssh client that has lost its connection, or got none. A rank may have it, too.
SSH_FAILED = 255


@dataclass(frozen=True)
class Ssh:
    """How programs of gradring are started on other hosts.

    Attributes:
        python: The interpreter there; it must have gradring.
        port: Of the ssh servers, where a host has none of its own; None for the usual one.
        options: Further arguments of ssh; they win over ours.
    """

    python: str = sys.executable
    port: int | None = None
    options: tuple[str, ...] = ()

    def command(self, host: Host, module: str, *arguments: str) -> list[str]:
        """The command line that runs a module of ours on ``host``."""
        remote = shlex.join([self.python, "-m", module, *arguments])
        return [*self._login(host, *OPTIONS), remote]

    def ask(self, host: Host, module: str, *arguments: str, limit_s: float) -> Any:
        """What a module of ours prints on ``host``, in JSON.

        Raises:
            OSError: There is no ssh.
            subprocess.SubprocessError: It took too long, or failed; has what ssh said.
            ValueError: It printed something else.
        """
        return last_line(run(self.command(host, module, *arguments), limit_s))

    def trial(self, host: Host) -> str:
        """What a user types to see whether ssh works."""
        return shlex.join([*self._login(host), "true"])

    def _login(self, host: Host, *more: str) -> list[str]:
        port = host.port or self.port
        # Of an option that is there twice, ssh takes the first.
        chosen = ([] if port is None else ["-p", str(port)]) + [*self.options, *more]
        return ["ssh", *chosen, host.target]


def run(command: Sequence[str], limit_s: float) -> str:
    """What a command prints.

    Raises:
        OSError: There is no ssh.
        subprocess.SubprocessError: It took too long, or failed; has what ssh said.
    """
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",  # a host may greet in another encoding
        timeout=limit_s,
        check=True,
    ).stdout


def last_line(printed: str) -> Any:
    """What the last line says, in JSON; shells may print greetings first.

    Raises:
        ValueError: It is none.
    """
    return json.loads(printed.rstrip().rpartition("\n")[2])


def forwarded(environ: Mapping[str, str], more: Sequence[str] = ()) -> dict[str, str]:
    """The variables that travel to other hosts.

    Args:
        environ: The variables of a rank.
        more: Further ones: ``NAME`` as in ``environ``, or ``NAME=VALUE``.
    """
    chosen = {name: text for name, text in environ.items() if name.startswith(FORWARDED_PREFIXES)}
    for entry in more:
        name, equals, text = entry.partition("=")
        if equals or name in environ:
            chosen[name] = text if equals else environ[name]
    return chosen


class RemoteRankProcess(RankProcess):
    """A rank on another host, with the interface of one on this."""

    def __init__(
        self,
        rank: int,
        host: Host,
        program: Program,
        environ: Mapping[str, str],
        guardian: Guardian,
        *,
        ssh: Ssh,
        local_size: int,
        hosts: Sequence[str],
        job: str | None,
    ) -> None:
        """Starts it; its streams are pipes.

        Args:
            rank: Its rank, for messages.
            host: Where to.
            program: What it runs.
            environ: The variables that differ from those of a login there.
            guardian: Ends the ssh client when this process is killed.
            ssh: How to get there.
            local_size: Ranks on that host, among which it divides its cores.
            hosts: Names of all hosts of the job.
            job: Under which its part of a timeline is collected; None if there is to be none.
        """
        login = ssh.command(host, "gradring.launch.remote_rank")
        super().__init__(rank, login, os.environ, guardian, stdin=PIPE, stdout=PIPE, stderr=PIPE)
        self.host = host.name
        self._failure = Path(environ["GRADRING_FAILURE_FILE"])
        self._killed_at: float | None = None
        order: dict[str, Any] = {
            "words": list(program.words),
            "module": program.module,
            "environ": dict(environ),
            "directory": os.getcwd(),
            "local_size": local_size,
            "hosts": list(hosts),
            "job": job,
        }
        self._tell(json.dumps(order))

    @property
    def exit_code(self) -> int | None:
        """Exit code, minus the signal's number when one killed the rank; None while it runs."""
        code = self.popen.returncode
        if code is not None and code > 128 and code - 128 in set(signal.Signals):
            return 128 - code
        return code

    @property
    def is_lost(self) -> bool:  # type: ignore[override]
        """Whether ssh has failed: the other end says so where the exit code is the rank's."""
        failed = self.popen.returncode == SSH_FAILED
        return failed and exit_code_left(self._failure) != SSH_FAILED

    @property
    def ending(self) -> str:
        """Words for how it has ended."""
        return f"connection lost, ssh {super().ending}" if self.is_lost else super().ending

    def signal(self, signum: int) -> None:
        """Has the other end signal its rank; kills the ssh client when that takes too long."""
        if self.popen.returncode is not None:
            super().signal(signum)
        elif signum != signal.SIGKILL:
            self._tell(str(int(signum)))
        elif self._killed_at is None:
            self._killed_at = time.monotonic()
            self._hang_up()
        elif time.monotonic() >= self._killed_at + CLOSING_S:
            super().signal(signum)

    def _tell(self, line: str) -> None:
        assert self.popen.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has gone, or we have hung up
            self.popen.stdin.write(line.encode() + b"\n")
            self.popen.stdin.flush()

    def _hang_up(self) -> None:
        assert self.popen.stdin is not None
        with contextlib.suppress(OSError):
            self.popen.stdin.close()
