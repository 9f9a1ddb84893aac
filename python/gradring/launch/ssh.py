"""A rank on another host: an ssh client here, and ``remote_rank`` at the other end.

The request for the rank (command, variables, token) and later signals go to the other end's
standard input, which no list of processes shows. When that input ends, for any reason, the other
end kills its rank. So no process is left behind when this machine dies.
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
#: Variables with these prefixes are always forwarded to other hosts.
FORWARDED_PREFIXES = ("GRADRING_", "TF_", "KERAS_", "OMP_", "PYTHON", "MALLOC_", "GLIBC_")
#: Time for the other end to kill its rank, before the ssh client itself is killed.
CLOSING_S = 2.0
#: Exit code of an ssh client without a connection. A rank can have the same exit code.
SSH_FAILED = 255


@dataclass(frozen=True)
class Ssh:
    """Access to other hosts by ssh.

    Attributes:
        python: The interpreter on these hosts; it must have gradring.
        port: Port of ssh servers for hosts without one of their own; None: ssh's default.
        options: Further arguments of ssh, with priority over ours.
    """

    python: str = sys.executable
    port: int | None = None
    options: tuple[str, ...] = ()

    def command(self, host: Host, module: str, *arguments: str) -> list[str]:
        """Returns the command line that runs a module of gradring on ``host``."""
        remote = shlex.join([self.python, "-m", module, *arguments])
        return [*self._login(host, *OPTIONS), remote]

    def ask(self, host: Host, module: str, *arguments: str, limit_s: float) -> Any:
        """Runs a module of gradring on ``host`` and returns its JSON output.

        Raises:
            OSError: ssh is not installed.
            subprocess.SubprocessError: The command exceeded its limit or failed; the error has
                ssh's output.
            ValueError: The output is not JSON.
        """
        return last_line(run(self.command(host, module, *arguments), limit_s))

    def trial(self, host: Host) -> str:
        """Returns a command with which the user can test ssh."""
        return shlex.join([*self._login(host), "true"])

    def _login(self, host: Host, *more: str) -> list[str]:
        port = host.port or self.port
        # If an option is given twice, ssh takes the first.
        chosen = ([] if port is None else ["-p", str(port)]) + [*self.options, *more]
        return ["ssh", *chosen, host.target]


def run(command: Sequence[str], limit_s: float) -> str:
    """Runs a command and returns its standard output.

    Raises:
        OSError: ssh is not installed.
        subprocess.SubprocessError: The command exceeded its limit or failed; the error has ssh's
            output.
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
    """Parses the last line as JSON; shells can print greetings before it.

    Raises:
        ValueError: The line is not JSON.
    """
    return json.loads(printed.rstrip().rpartition("\n")[2])


def forwarded(environ: Mapping[str, str], more: Sequence[str] = ()) -> dict[str, str]:
    """Returns the variables to forward to other hosts.

    Args:
        environ: The variables of a rank.
        more: Further variables: ``NAME`` for the value in ``environ``, or ``NAME=VALUE``.
    """
    chosen = {name: text for name, text in environ.items() if name.startswith(FORWARDED_PREFIXES)}
    for entry in more:
        name, equals, text = entry.partition("=")
        if equals or name in environ:
            chosen[name] = text if equals else environ[name]
    return chosen


class RemoteRankProcess(RankProcess):
    """A rank on another host, with the interface of a local rank."""

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
        """Starts the rank; its streams are pipes.

        Args:
            rank: The rank, for messages.
            host: The host to start it on.
            program: The rank's program.
            environ: Variables to set in addition to a login's variables on that host.
            guardian: Kills the ssh client if this process is killed.
            ssh: Access to the host.
            local_size: Number of ranks on that host, which share its cores.
            hosts: Names of all hosts of the job.
            job: Name of the run for `collect`; None if no timeline is recorded.
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
        """Exit code; minus the signal's number if one killed the rank; None while it runs."""
        code = self.popen.returncode
        if code is not None and code > 128 and code - 128 in set(signal.Signals):
            return 128 - code
        return code

    @property
    def is_lost(self) -> bool:  # type: ignore[override]
        """True if ssh itself has failed; the failure file shows if the exit code is the rank's."""
        failed = self.popen.returncode == SSH_FAILED
        return failed and exit_code_left(self._failure) != SSH_FAILED

    @property
    def ending(self) -> str:
        """Description of the exit code or the lost connection."""
        return f"connection lost, ssh {super().ending}" if self.is_lost else super().ending

    def signal(self, signum: int) -> None:
        """Sends a signal to the rank by ssh; kills the ssh client if SIGKILL takes too long."""
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
        with contextlib.suppress(OSError, ValueError):  # the other end, or the pipe, is closed
            self.popen.stdin.write(line.encode() + b"\n")
            self.popen.stdin.flush()

    def _hang_up(self) -> None:
        assert self.popen.stdin is not None
        with contextlib.suppress(OSError):
            self.popen.stdin.close()
