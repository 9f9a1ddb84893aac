"""Jobs on machines, and what their ranks say in lines of JSON."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from machines.machine import Laboratory
from support.waiting import wait_until

PROGRAMS = Path(__file__).parent / "programs"
#: Limit of a job; the machines compute about 20 times slower than this host.
JOB_S = 400.0


class Job:
    """A command of this host that runs, and its output so far."""

    def __init__(self, command: list[str], environ: Mapping[str, str], output: Path) -> None:
        self._output = output
        self.began = time.monotonic()
        with open(output, "wb") as file:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environ},
            )

    @property
    def output(self) -> str:
        """All that it has written."""
        return self._output.read_text(errors="replace")

    def wait_for(self, pattern: str, within_s: float = JOB_S) -> None:
        """Waits until its output has this pattern, for as long as it runs."""

        def found() -> bool:
            is_there = re.search(pattern, self.output) is not None
            assert is_there or self.process.poll() is None, self.output
            return is_there

        wait_until(found, f"{pattern} in the output of {self.process.args!r}", within_s)

    def end(self, within_s: float = JOB_S) -> int:
        """Waits for its end and returns the exit code.

        Raises:
            AssertionError: It runs for too long.
        """
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it hangs: {self.output}") from None

    def said(self) -> dict[int, dict[str, Any]]:
        """What each rank has said, by rank; a program without a launcher counts as rank 0."""
        lines = re.findall(r"^(?:\[(\d+)\] )?said (.*)$", self.output, re.MULTILINE)
        return {int(rank or 0): json.loads(text) for rank, text in lines}


@contextlib.contextmanager
def started(lab: Laboratory, command: list[str], **environ: str) -> Iterator[Job]:
    """Starts a job, which ends with the block; its output stays as long as the laboratory.

    Yields:
        The job.
    """
    job = Job(command, environ, lab.new_file("output"))
    try:
        yield job
    finally:
        if job.process.poll() is None:
            job.process.terminate()
            try:
                job.process.wait(30.0)
            except subprocess.TimeoutExpired:
                job.process.kill()
                job.process.wait()


def ended(lab: Laboratory, command: list[str], within_s: float = JOB_S, /, **environ: str) -> Job:
    """Runs a job to its end, which must be a success."""
    with started(lab, command, **environ) as job:
        code = job.end(within_s)
    assert code == 0, job.output
    return job
