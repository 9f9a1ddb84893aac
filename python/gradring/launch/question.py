"""A program whose answer is polled, without waiting for it."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO

from gradring.launch.guardian import Guardian
from gradring.launch.processes import GroupLeader

#: Longest answer; longer than the names of the largest possible number of hosts.
ANSWER_BYTES_MAX = 1 << 20


class Question:
    """A running program whose standard output is the answer."""

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        guardian: Guardian,
        *,
        now: float,
        limit_s: float,
    ) -> None:
        """Starts the program.

        Args:
            command: Program and arguments.
            environ: All variables of the program.
            guardian: Kills the program if this process is killed.
            now: The time.
            limit_s: Time limit.
        """
        self._command = list(command)
        self._limit_s = limit_s
        self._until = now + limit_s
        self._guardian = guardian
        # Files, unlike pipes, hold any amount of output without a reader.
        with contextlib.ExitStack() as files:
            self._printed = files.enter_context(tempfile.TemporaryFile())
            self._complained = files.enter_context(tempfile.TemporaryFile())
            self._process = GroupLeader(
                command, environ, guardian, stdout=self._printed, stderr=self._complained
            )
            self._files = files.pop_all()

    def answer(self, now: float) -> str | None:
        """Returns the program's output; None while it runs. Call it until it returns an output.

        Raises:
            CalledProcessError: The program failed; the error has its output.
            TimeoutExpired: The program exceeded its time limit and was killed.
        """
        code = self._process.poll()
        if code is None and now < self._until:
            return None
        printed, complained = (_text_of(file) for file in (self._printed, self._complained))
        self.close()
        if code is None:
            raise subprocess.TimeoutExpired(self._command, self._limit_s)
        if code != 0:
            raise subprocess.CalledProcessError(code, self._command, printed, complained)
        return printed

    def close(self) -> None:
        """Kills the program and its children, if they still run."""
        self._process.signal(signal.SIGKILL)
        self._process.popen.wait()
        self._guardian.forget(self._process.pid)
        self._files.close()


def _text_of(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(ANSWER_BYTES_MAX).decode(errors="replace")
