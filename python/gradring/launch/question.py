"""A program that is asked something, and is not waited for."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO

from gradring.launch.guardian import Guardian
from gradring.launch.processes import GroupLeader

#: Of an answer: more than the names of as many hosts as a group may have.
ANSWER_BYTES_MAX = 1 << 20


class Question:
    """A running program, whose answer is what it prints."""

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
            environ: All of its variables.
            guardian: Ends it when this process is killed.
            now: The time.
            limit_s: How long it may take.
        """
        self._command = list(command)
        self._limit_s = limit_s
        self._until = now + limit_s
        self._guardian = guardian
        # Files hold however much it prints, and nobody has to read meanwhile.
        with contextlib.ExitStack() as files:
            self._printed = files.enter_context(tempfile.TemporaryFile())
            self._complained = files.enter_context(tempfile.TemporaryFile())
            self._process = GroupLeader(
                command, environ, guardian, stdout=self._printed, stderr=self._complained
            )
            self._files = files.pop_all()

    def answer(self, now: float) -> str | None:
        """What it has printed; None while it runs. To be asked until it is something else.

        Raises:
            CalledProcessError: It failed; has what it said.
            TimeoutExpired: It took too long, and has been ended.
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
        """Ends the program, if it still runs, and what it has started."""
        self._process.signal(signal.SIGKILL)
        self._process.popen.wait()
        self._guardian.forget(self._process.pid)
        self._files.close()


def _text_of(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(ANSWER_BYTES_MAX).decode(errors="replace")
